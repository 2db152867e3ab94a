"""KV-cache layouts: the order of the cache's axes in memory.

The caches of a model have five axes: layer (L), block (B), head (H), slot (N), content (C: the key
and value of one slot and head). This is the logical order of vLLM 0.33, in which the values of
`KVCacheLayout` count them. A layout is their order in memory, outermost first. It never changes a
result or the indices of a view: a layer's cache has the axes keys and values, block, slot, head,
element in every layout. It changes what is contiguous: all heads of a token (..N, H, C), all tokens
of a head (..H, N, C), or all layers of a block (B, L, ..), which then moves in one copy.
"""

import os
from collections.abc import Iterable, Sequence
from enum import Enum

from .checks import check_not_negative, check_positive
from .specs import KVCacheSpec

KV_CACHE_LAYOUT_VARIABLE = "PAGETWIN_KV_CACHE_LAYOUT"
LAYER, BLOCK, HEAD, SLOT, CONTENT = range(5)


class KVCacheLayout(Enum):
    """The layouts of vLLM 0.33 for the caches of all layers.

    A member's value lists the logical axes, 0 for L to 4 for C, the outermost in memory first.
    NHD and HND are the older names for one layer's cache: the heads of a token are contiguous, or
    the tokens of a head.
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
        """Whether the bytes of a layer are contiguous."""
        return self.stride_order[0] == LAYER

    @property
    def is_block_compact(self) -> bool:
        """Whether a block of one layer is contiguous in memory."""
        return set(self.stride_order[:2]) == {LAYER, BLOCK}

    @property
    def is_block_contiguous(self) -> bool:
        """Whether a block of one layer is contiguous, in the logical order [H, N, C]."""
        return self.stride_order[2:] == (HEAD, SLOT, CONTENT)

    @property
    def is_block_outermost(self) -> bool:
        """Whether a block of all layers is contiguous in memory."""
        return self.stride_order[0] == BLOCK

    @property
    def slots_before_heads(self) -> bool:
        """Whether the heads of a token are contiguous (NHD), not the tokens of a head (HND)."""
        return self.stride_order.index(SLOT) < self.stride_order.index(HEAD)


def compute_kv_cache_shape_bytes(
    spec: KVCacheSpec, num_blocks: int, kernel_block_size: int | None = None
) -> tuple[int, int, int, int]:
    """Return the lengths of one layer's axes [B, H, N, C], the content C in bytes.

    Args:
        spec: content of a block.
        num_blocks: blocks of the engine, at least 0.
        kernel_block_size: Optional. Slots in a block of the kernels, which divides the engine's
            block. If None, both are the same.

    Raises:
        ValueError: the kernel's blocks do not divide a block, or its pages are padded.

    Source:
        vLLM 0.33's `compute_layer_kv_cache_shape_bytes`.

    Example:
        5 blocks of 16 slots, 2 heads of 64 bfloat16 elements: (5, 2, 16, 256). With kernel blocks
        of 8 slots: (10, 2, 8, 256).
    """
    check_not_negative(num_blocks=num_blocks)
    parts, content = 1, spec.state_content_size_bytes
    if kernel_block_size is not None:
        parts = _count_kernel_blocks(spec, kernel_block_size)
    return (num_blocks * parts, spec.num_heads, spec.num_states // parts, content)


def compute_layout_strides(
    spec: KVCacheSpec,
    num_blocks: int,
    num_layers: int,
    layout: KVCacheLayout,
    kernel_block_size: int | None = None,
) -> tuple[int, int, int, int, int]:
    """Return the strides in bytes of the axes [L, B, H, N, C] in one allocation of all layers.

    The padding of a page follows its content. So in a padded cache the axes outside of a page are
    layers and blocks, and heads if there is one.

    Args:
        spec: content of a block of one layer.
        num_blocks, num_layers: lengths of the two outer axes.
        layout: order of the axes in memory.
        kernel_block_size: Optional. Slots in a block of the kernels. If None, the engine's.

    Raises:
        ValueError: pages are padded and the layout divides them, or the kernel's blocks do not
            divide a block.

    Source:
        vLLM 0.33's function of that name.

    Example:
        5 blocks of 8,192 bytes with 2 heads and 16 slots of 256 bytes, 3 layers, BLNHC: (8192,
        24576, 256, 512, 1). A block of all layers has 24,576 bytes.
    """
    shape = (
        num_layers,
        *compute_kv_cache_shape_bytes(spec, num_blocks, kernel_block_size),
    )
    ends_page = spec.page_size_bytes > spec.real_page_size_bytes
    if ends_page:
        _check_pages_are_whole(layout, spec.num_heads)
    strides, step = [0, 0, 0, 0, 0], 1
    for axis in reversed(layout.stride_order):
        if ends_page and axis in (LAYER, BLOCK):
            ends_page, step = False, spec.page_size_bytes
        strides[axis] = step
        step *= shape[axis]
    layers, blocks, heads, slots, content = strides
    return layers, blocks, heads, slots, content


def _count_kernel_blocks(spec: KVCacheSpec, kernel_block_size: int) -> int:
    """Return the kernel's blocks in a block; raise an error if they do not divide it."""
    check_positive(kernel_block_size=kernel_block_size)
    parts, rest = divmod(spec.block_size, kernel_block_size)
    if rest or spec.num_states % parts:
        raise ValueError(
            f"kernel_block_size = {kernel_block_size}: expected a divisor of block_size ="
            f" {spec.block_size} with whole cells"
        )
    if parts > 1 and spec.page_size_bytes > spec.real_page_size_bytes:
        raise ValueError(
            f"kernel_block_size = {kernel_block_size}: expected block_size ="
            f" {spec.block_size}, since the padding of a page is at its end"
        )
    return parts


def _check_pages_are_whole(layout: KVCacheLayout, num_heads: int) -> None:
    """Raise an error for padded pages in a layout that divides them by head."""
    if layout.stride_order.index(HEAD) < 2 and num_heads > 1:
        raise ValueError(
            f"layout = {layout.name}: expected one whose blocks hold all {num_heads} heads,"
            " since pages are padded"
        )


DEFAULT_PREFERENCE = (
    KVCacheLayout.LBNHC,
    KVCacheLayout.LBHNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BLHNC,
    KVCacheLayout.BHLNC,
    KVCacheLayout.LHBNC,
)
"""Preferred layouts if no backend declares any; vLLM's default is NHD."""


def layout_from_name(name: str) -> KVCacheLayout:
    """Return the layout of that name.

    Raises:
        ValueError: the name is unknown. The message lists all layouts.
    """
    if not is_valid_kv_cache_layout(name):
        raise ValueError(
            f"kv_cache_layout = {name!r}: expected one of"
            f" {', '.join(KVCacheLayout.__members__)}"
        )
    return KVCacheLayout[name]


def is_valid_kv_cache_layout(name: str) -> bool:
    """Return whether a layout has that name."""
    return name in KVCacheLayout.__members__


def get_kv_cache_layout(
    override: str | KVCacheLayout | None = None,
    connector_layout: str | KVCacheLayout = KVCacheLayout.NHD,
) -> KVCacheLayout:
    """Return the layout chosen by argument, else by environment, else by connector.

    The environment is read at every call. To set a layout, pass it.

    Args:
        override: Optional. The caller's choice.
        connector_layout: layout that the transfer of caches to other machines needs.

    Raises:
        ValueError: not the name of a layout. The message names its origin.

    Source:
        vLLM's function of that name, and its set_kv_cache_layout.

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
    """Return the layouts that every backend supports, the most preferred first.

    Args:
        declared: the layouts of each backend, most preferred first. If None, all.

    Returns:
        If all lists are equal, that list. Otherwise the common layouts, sorted by the number of
        backends that prefer them, ties in the enum's order.

    Raises:
        ValueError: the backends have no common layout.

    Source:
        vLLM 0.33's function of that name.
    """
    lists = [list(order) for order in declared if order is not None]
    if not lists:
        return list(DEFAULT_PREFERENCE)
    if all(order == lists[0] for order in lists):
        return lists[0]
    common = [
        layout for layout in KVCacheLayout if all(layout in order for order in lists)
    ]
    if not common:
        said = "; ".join(", ".join(layout.name for layout in order) for order in lists)
        raise ValueError(f"the backends have no common layout: {said}")
    firsts = [order[0] for order in lists]
    return sorted(common, key=lambda layout: -firsts.count(layout))


def get_flashinfer_layout_string(layout: KVCacheLayout) -> str:
    """Return FlashInfer's name of the order of slots and heads.

    Raises:
        ValueError: the heads are outside the blocks, which FlashInfer does not support.
    """
    if layout is KVCacheLayout.LHBNC:
        raise ValueError(
            "kv_cache_layout = LHBNC: expected a layout whose blocks hold all heads;"
            " FlashInfer has no name for others"
        )
    return "NHD" if layout.slots_before_heads else "HND"
