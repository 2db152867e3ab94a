"""In which order do the axes of a cache lie in memory?

The caches of a model have five axes: layer (L), block (B), head (H), slot (N), content (C: a
slot's key and value of one head, side by side). Code always indexes them in this order; a layout
says in which order they lie in memory, the outermost first. So a layout never changes what is
computed. It changes what lies together: all heads of a token (..N, H, C), all tokens of a head
(..H, N, C), or all layers of a block (B, L, ..), which then moves in one copy.
"""

import os
from collections.abc import Iterable, Sequence
from enum import Enum

KV_CACHE_LAYOUT_VARIABLE = "PAGETWIN_KV_CACHE_LAYOUT"
LAYER, BLOCK, HEAD, SLOT, CONTENT = range(5)


class KVCacheLayout(Enum):
    """The orders in which vLLM 0.33 lays out the caches of all layers.

    A member's value lists the logical axes, 0 for L to 4 for C, the outermost in memory first.
    NHD and HND, the older names, say how one layer's cache lies: a token's heads together, or a
    head's tokens together.
    """

    LBHNC = (LAYER, BLOCK, HEAD, SLOT, CONTENT)
    LBNHC = (LAYER, BLOCK, SLOT, HEAD, CONTENT)
    LHBNC = (LAYER, HEAD, BLOCK, SLOT, CONTENT)
    BLHNC = (BLOCK, LAYER, HEAD, SLOT, CONTENT)
    BLNHC = (BLOCK, LAYER, SLOT, HEAD, CONTENT)
    BHLNC = (BLOCK, HEAD, LAYER, SLOT, CONTENT)
    HND = LBHNC
    NHD = LBNHC

    @property
    def stride_order(self) -> tuple[int, ...]:
        """The logical axes [L, B, H, N, C], the outermost in memory first."""
        order: tuple[int, ...] = self.value
        return order

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """The same for one layer's axes [B, H, N, C]."""
        return tuple(axis - 1 for axis in self.stride_order if axis != LAYER)

    @property
    def is_layer_compact(self) -> bool:
        """A layer's bytes lie in one piece."""
        return self.stride_order[0] == LAYER

    @property
    def is_block_compact(self) -> bool:
        """A block of one layer lies in one piece."""
        return set(self.stride_order[:2]) == {LAYER, BLOCK}

    @property
    def is_block_contiguous(self) -> bool:
        """A block of one layer lies in one piece, in the logical order [H, N, C]."""
        return self.stride_order[2:] == (HEAD, SLOT, CONTENT)

    @property
    def is_block_outermost(self) -> bool:
        """A block of all layers lies in one piece."""
        return self.stride_order[0] == BLOCK

    @property
    def slots_before_heads(self) -> bool:
        """A token's heads lie together (NHD), not a head's tokens (HND)."""
        return self.stride_order.index(SLOT) < self.stride_order.index(HEAD)


DEFAULT_PREFERENCE = (
    KVCacheLayout.LBNHC,
    KVCacheLayout.LBHNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BLHNC,
    KVCacheLayout.BHLNC,
    KVCacheLayout.LHBNC,
)
"""What is tried first where no backend says what it prefers: vLLM's default is NHD."""


def layout_from_name(name: str) -> KVCacheLayout:
    """Return the layout of that name.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    if not is_valid_kv_cache_layout(name):
        raise ValueError(
            f"kv_cache_layout = {name!r}: expected one of"
            f" {', '.join(KVCacheLayout.__members__)}"
        )
    return KVCacheLayout[name]


def is_valid_kv_cache_layout(name: str) -> bool:
    """Tell whether a layout has that name."""
    return name in KVCacheLayout.__members__


def get_kv_cache_layout(
    override: str | KVCacheLayout | None = None,
    connector_layout: str | KVCacheLayout = KVCacheLayout.NHD,
) -> KVCacheLayout:
    """Return the layout that was asked for: by argument, by environment, by connector.

    The environment is read at every call; nothing is remembered. To set a layout, pass it.

    Args:
        override: the caller's choice; None: he has none.
        connector_layout: what the transfer of caches to other machines wants.

    Raises:
        ValueError: the name of no layout; the message says where it came from.

    Source:
        vLLM's function of that name, which remembers its first answer, so that a later choice has
        no effect, and its set_kv_cache_layout, which takes any word.

    Example:
        PAGETWIN_KV_CACHE_LAYOUT=HND: get_kv_cache_layout() is LBHNC, and
        get_kv_cache_layout("NHD") is LBNHC.
    """
    variable = os.environ.get(KV_CACHE_LAYOUT_VARIABLE)
    if override is not None:
        choice, origin = override, "override"
    elif variable:
        choice, origin = variable, f"environment variable {KV_CACHE_LAYOUT_VARIABLE}"
    else:
        choice, origin = connector_layout, "connector_layout"
    if isinstance(choice, KVCacheLayout):
        return choice
    try:
        return layout_from_name(choice)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def get_supported_kv_cache_layouts(
    declared: Iterable[Sequence[KVCacheLayout] | None],
) -> list[KVCacheLayout]:
    """Return the layouts that every backend takes, the most preferred first.

    Args:
        declared: what each backend takes, most preferred first; None: any.

    Returns:
        Where all agree, their list; else the common layouts, those first that most backends put
        first, ties in the enum's order.

    Raises:
        ValueError: no layout suits them all.

    Source:
        vLLM 0.33's function of that name.
    """
    lists = [list(each) for each in declared if each is not None]
    if not lists:
        return list(DEFAULT_PREFERENCE)
    if all(each == lists[0] for each in lists):
        return lists[0]
    common = [
        layout for layout in KVCacheLayout if all(layout in each for each in lists)
    ]
    if not common:
        said = "; ".join(", ".join(layout.name for layout in each) for each in lists)
        raise ValueError(f"the backends take no layout in common: {said}")
    firsts = [each[0] for each in lists]
    return sorted(common, key=lambda layout: -firsts.count(layout))


def get_flashinfer_layout_string(layout: KVCacheLayout) -> str:
    """Return the name that FlashInfer gives to the order of slots and heads.

    Raises:
        ValueError: the heads lie outside the blocks, which it cannot read.
    """
    if layout is KVCacheLayout.LHBNC:
        raise ValueError(
            "kv_cache_layout = LHBNC: expected a layout whose blocks hold all heads;"
            " FlashInfer has no name for others"
        )
    return "NHD" if layout.slots_before_heads else "HND"
