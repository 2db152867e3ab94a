"""KV-cache specs: the page of a layer, and the tensors and groups of a model.

A spec describes the content of a layer's block and thereby the size of a page. A config describes
the memory of a whole model's caches. Layers with equal pages form a group with one block table.
Layers of different groups may share one tensor.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd

import torch

from .cache_formats import FORMATS
from .checks import (
    check_has_states,
    check_latent_fields,
    check_not_negative,
    check_padded_page,
    check_positive,
)
from .layer_pages import check_stored_format, state_bytes


@dataclass(frozen=True)
class MultipleOf:
    """Every size that is a multiple of `base`."""

    base: int

    def __post_init__(self) -> None:
        check_positive(base=self.base)

    def __str__(self) -> str:
        return f"a multiple of {self.base}"


@dataclass(frozen=True)
class KVCacheSpec:
    """The page of one attention layer: the content of a block and its size in bytes.

    A page has `num_heads * num_states` cells. A cell is the key and the value of one slot and head.

    Args:
        block_size: slots (tokens) in a block, at least 1.
        num_kv_heads: key/value heads of the layer.
        head_size: elements of one head's key, and of its value.
        dtype: dtype of the cache. An FP8 dtype has one byte per element. Its scales are stored
            with the layer, not in a page.
        head_size_v: Optional. Elements of a head's value. If None, as many as of its key.
        num_head_slots: Optional. Heads in a page, if a format stores more or fewer than the layer
            has. If None, `num_kv_heads`.
        state_content_bytes: Optional. Bytes of a cell in a format of its own. If None, those of a
            key and a value in `dtype`.
        kv_cache_dtype: Optional. Name of a cache format whose scales are stored in the page, after
            the codes of each key and of each value; `dtype` is that of its codes. If None, no
            scale is stored.
        tokens_per_state: tokens that are compressed to one cell per head; a fraction if a token
            has several.
        page_size_padded: Optional. Bytes of a page with the padding at its end. If None, pages
            are not padded.
        block_stride_alignment: Optional. Bytes, or a number of slots, that a kernel wants the
            distance between two blocks to be a multiple of. If None, any distance is right.
        dcp_sharded: whether decode context parallelism divides the keys among its ranks.

    Raises:
        ValueError: a number is below 1, a block has no cell, the padded page is smaller than
            its content, or a page cannot hold the codes and scales of the format.

    Example:
        16 slots of 8 heads of 128 bfloat16 elements, keys and values: 65,536 bytes per page. With
        float8_e4m3fn elements: 32,768 bytes. In int8_per_token_head each key and value has four
        bytes more: 33,792.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16
    head_size_v: int | None = field(default=None, kw_only=True)
    num_head_slots: int | None = field(default=None, kw_only=True)
    state_content_bytes: int | None = field(default=None, kw_only=True)
    kv_cache_dtype: str | None = field(default=None, kw_only=True)
    tokens_per_state: int | Fraction = field(default=1, kw_only=True)
    page_size_padded: int | None = field(default=None, kw_only=True)
    block_stride_alignment: int | MultipleOf | None = field(default=None, kw_only=True)
    dcp_sharded: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        numbers = {
            "block_size": self.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "num_head_slots": self.num_head_slots,
            "state_content_bytes": self.state_content_bytes,
        }
        if not isinstance(self.block_stride_alignment, MultipleOf):
            numbers["block_stride_alignment"] = self.block_stride_alignment
        given = {name: number for name, number in numbers.items() if number is not None}
        check_positive(**given)
        check_has_states(self.block_size, self.tokens_per_state)
        if self.kv_cache_dtype is not None:
            sizes = (self.head_size, self.head_size_v or self.head_size)
            check_stored_format(self.kv_cache_dtype, self.dtype, *sizes)
        if self.page_size_padded is not None:
            check_padded_page(self.page_size_padded, self.real_page_size_bytes)

    @property
    def has_plain_cells(self) -> bool:
        """Whether a cell is a key and a value of `stored_head_size` elements of the dtype."""
        return (
            self.head_size_v in (None, self.head_size)
            and self.num_head_slots in (None, self.num_kv_heads)
            and self.state_content_bytes is None
            and self.tokens_per_state == 1
        )

    @property
    def stored_head_size(self) -> int:
        """Elements of a key in a page: `head_size`, or the bytes of its codes and of its scale."""
        if self.kv_cache_dtype is None:
            return self.head_size
        form = FORMATS[self.kv_cache_dtype]
        return state_bytes(form, self.head_size, self.head_size) // 2

    @property
    def num_heads(self) -> int:
        """Heads in a page."""
        return self.num_head_slots or self.num_kv_heads

    @property
    def num_states(self) -> int:
        """Cells per head in a page."""
        return self._states_of(self.block_size)

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of a cell."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        if self.kv_cache_dtype is not None:
            form = FORMATS[self.kv_cache_dtype]
            return state_bytes(form, self.head_size, self.head_size_v or self.head_size)
        elements = self.head_size + (self.head_size_v or self.head_size)
        return elements * self.dtype.itemsize

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block, its keys and its values together, without padding."""
        return self.num_heads * self.num_states * self.state_content_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes from one block to the next: its content and the padding at its end."""
        return self.page_size_padded or self.real_page_size_bytes

    @property
    def block_stride_alignment_bytes(self) -> int:
        """Bytes that the distance between two blocks must be a multiple of.

        Example:
            A block of 64 slots, MultipleOf(24): kernels read 8 slots at once, so the bytes of 8
            slots. MultipleOf(64): kernels read whole blocks, so 1.
        """
        wanted = self.block_stride_alignment
        if not isinstance(wanted, MultipleOf):
            return 1 if wanted is None else wanted
        slots = gcd(wanted.base, self.block_size)
        if slots == self.block_size:
            return 1
        cells = self.num_heads * self._states_of(slots)
        return cells * self.state_content_size_bytes

    def _states_of(self, num_slots: int) -> int:
        """Return the cells per head of some slots."""
        return int(num_slots // self.tokens_per_state)


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """A layer that stores the keys and values of its whole sequence.

    Args:
        sliding_window, attention_chunk_size: Optional. Visible range of the layer, if the engine
            stores all blocks of a layer that needs only some, to have fewer groups. If None, all
            keys are visible.
    """

    sliding_window: int | None = field(default=None, kw_only=True)
    attention_chunk_size: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A layer whose tokens attend to the last `sliding_window` keys, their own included.

    Args:
        sliding_window: number of visible keys.
        extra_retained_tokens: tokens before the window whose keys are kept too.
    """

    sliding_window: int = field(kw_only=True)
    extra_retained_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(
            sliding_window=self.sliding_window,
            extra_retained_tokens=self.extra_retained_tokens,
        )

    @property
    def num_retained_tokens(self) -> int:
        """Tokens before the next one whose keys it needs."""
        return max(self.sliding_window - 1, 0) + self.extra_retained_tokens


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A layer whose tokens attend to the keys of their own chunk of `attention_chunk_size`."""

    attention_chunk_size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(attention_chunk_size=self.attention_chunk_size)


@dataclass(frozen=True)
class CrossAttentionSpec(KVCacheSpec):
    """A decoder layer that stores the keys and values of the encoder's tokens."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A layer that stores one latent vector per token, from which keys and values are computed.

    `head_size` is the latent's length, its rotary part included.

    Args:
        alignment: Optional. Bytes that the size of a page is rounded up to a multiple of. If
            None, pages are not rounded.

    Raises:
        ValueError: values of their own size, a format with stored scales, or both `alignment` and
            `page_size_padded`, are given.

    Example:
        16 slots of one latent of 576 bfloat16 elements: 18,432 bytes per page.
    """

    alignment: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alignment is not None:
            check_positive(alignment=self.alignment)
        check_latent_fields(self.head_size_v, self.alignment, self.page_size_padded)
        if self.kv_cache_dtype is not None:
            raise ValueError(
                f"kv_cache_dtype = {self.kv_cache_dtype!r} of a latent: expected None, since a"
                " latent has formats of its own (state_content_bytes)"
            )

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of a cell. A latent represents key and value, so it is counted once."""
        return self.state_content_bytes or self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes from one block to the next, rounded up to the alignment."""
        if self.alignment is None:
            return super().page_size_bytes
        return -(-self.real_page_size_bytes // self.alignment) * self.alignment


@dataclass(frozen=True)
class KVCacheTensor:
    """One allocation, and the layers that share it.

    Args:
        size: size in bytes.
        shared_by: layers of different groups. Each has a view of all bytes, and a block belongs
            to the group to which it is allocated.
    """

    size: int
    shared_by: tuple[str, ...]

    def __post_init__(self) -> None:
        check_not_negative(size=self.size)
        object.__setattr__(self, "shared_by", tuple(self.shared_by))


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers with equal pages, which share one block table.

    Args:
        layer_names: names of at least one layer.
        kv_cache_spec: page of each of them.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", tuple(self.layer_names))


@dataclass(frozen=True)
class KVCacheConfig:
    """The tensors and groups of all layers' caches.

    Args:
        num_blocks: number of blocks that can be allocated.
        kv_cache_tensors: the allocations.
        kv_cache_groups: the groups. Every layer is in one tensor and one group.

    Raises:
        ValueError: a layer is in two tensors or groups, or missing in one of the lists.
    """

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    def __post_init__(self) -> None:
        check_not_negative(num_blocks=self.num_blocks)
        object.__setattr__(self, "kv_cache_tensors", tuple(self.kv_cache_tensors))
        object.__setattr__(self, "kv_cache_groups", tuple(self.kv_cache_groups))
        in_tensors = _each_once(
            "kv_cache_tensors", (tensor.shared_by for tensor in self.kv_cache_tensors)
        )
        in_groups = _each_once(
            "kv_cache_groups", (group.layer_names for group in self.kv_cache_groups)
        )
        for here, there, names in (
            ("kv_cache_groups", "kv_cache_tensors", in_groups - in_tensors),
            ("kv_cache_tensors", "kv_cache_groups", in_tensors - in_groups),
        ):
            if names:
                raise ValueError(
                    f"layer {min(names)!r} is in {here} but not in {there}: expected"
                    " every layer in one tensor and one group"
                )


def _each_once(what: str, lists: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the layers of some lists; raise if one is listed twice."""
    counts = Counter(name for names in lists for name in names)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(
                f"layer {name!r} is {count} times in {what}: expected once, since a"
                " layer has one cache"
            )
    return set(counts)


@dataclass(frozen=True)
class CacheConfig:
    """The engine's settings for the caches of all layers (vLLM's name).

    Args:
        block_size: slots in a block.
        cache_dtype: "auto" for the model's dtype, "fp8", or the name of a cache format.
        sliding_window: Optional. Window of layers without one of their own. If None, all keys
            are visible.
        calculate_kv_scales: whether the first step measures the scales of an FP8 cache with one
            scale. Formats that store scales measure those of each token.
        is_attention_free: whether the model has no attention layer.
    """

    block_size: int = 16
    cache_dtype: str = "auto"
    sliding_window: int | None = None
    calculate_kv_scales: bool = False
    is_attention_free: bool = False
