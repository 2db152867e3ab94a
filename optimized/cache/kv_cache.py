"""What is the cache made of, and how is it cut into blocks?

Views cost nothing, so there is nothing to make faster: the same views of the same bytes, their
strides left to torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract.layouts import KVCacheLayout
from ...contract.shapes import (
    KeyCache,
    KVCache,
    LayeredKVCache,
    PackedKeyCache,
    PackedKVCache,
    PackedValueCache,
    RawCache,
    ValueCache,
)
from ...contract.specs import KVCacheSpec
from ...validation import check_not_negative, check_positive
from ...validation.kv_cache import check_packed, check_view, check_whole_pages


def get_kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int, int]:
    """Return the five axes of a layer's cache."""
    check_not_negative(num_blocks=num_blocks)
    check_positive(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size
    )
    return (2, num_blocks, block_size, num_kv_heads, head_size)


def allocate_kv_cache(
    spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu"
) -> RawCache:
    """Return the bytes of one layer's cache, all zero."""
    check_not_negative(num_blocks=num_blocks)
    num_bytes = num_blocks * spec.page_size_bytes
    return torch.zeros(num_bytes, dtype=torch.int8, device=device)


def view_kv_cache(
    raw: RawCache,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride_order: Sequence[int],
) -> Tensor:
    """Return bytes seen as a tensor whose axes lie in memory in a given order."""
    check_view(raw, dtype, shape, stride_order)
    elements = raw.view(dtype)
    # step: let the axes lie in memory in that order
    in_memory = elements.view([shape[axis] for axis in stride_order])
    # step: index them in their own
    return in_memory.permute([stride_order.index(axis) for axis in range(len(shape))])


def reshape_kv_cache(
    raw: RawCache,
    spec: KVCacheSpec,
    stride_order: Sequence[int] = (0, 1, 2, 3, 4),
) -> KVCache:
    """Return the bytes seen as a layer's cache; nothing is copied."""
    # step: count the pages
    num_blocks = check_whole_pages("raw", raw, spec.page_size_bytes)
    # step: cut them into the five axes
    shape = get_kv_cache_shape(
        num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
    )
    return view_kv_cache(raw, spec.dtype, shape, stride_order)


def reshape_layered_kv_cache(
    raw: RawCache, spec: KVCacheSpec, num_layers: int, layout: KVCacheLayout
) -> LayeredKVCache:
    """Return the bytes of one allocation seen as the caches of many layers."""
    check_positive(num_layers=num_layers)
    # step: count the pages
    num_blocks = check_whole_pages("raw", raw, num_layers * spec.page_size_bytes)
    # step: lay out layer, block, head, slot and content
    shape = (
        num_layers,
        num_blocks,
        spec.num_kv_heads,
        spec.block_size,
        2 * spec.head_size,
    )
    caches = view_kv_cache(raw, spec.dtype, shape, layout.stride_order)
    # step: split the content into key and value
    halves = caches.view(*shape[:4], 2, spec.head_size)
    return halves.permute(0, 4, 1, 3, 2, 5)


def split_kv_cache(kv_cache: KVCache) -> tuple[KeyCache, ValueCache]:
    """Return the key half and the value half of a layer's cache; nothing is copied."""
    return kv_cache[0], kv_cache[1]


def get_packed_kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int]:
    """Return the three axes of a layer's cache in the first kernels' form."""
    two, blocks, slots, heads, elements = get_kv_cache_shape(
        num_blocks, block_size, num_kv_heads, head_size
    )
    return (two, blocks, slots * heads * elements)


def split_packed_kv_cache(
    kv_cache: PackedKVCache, num_kv_heads: int, head_size: int
) -> tuple[PackedKeyCache, PackedValueCache]:
    """Return the key view and the value view of a cache in the first kernels' form."""
    check_packed(kv_cache, num_kv_heads, head_size)
    _, num_blocks, block_elements = kv_cache.shape
    # step: count the slots of a block, and the elements of 16 bytes
    block_size = block_elements // (num_kv_heads * head_size)
    part = 16 // kv_cache.element_size()
    # step: cut the keys into parts
    key_cache = kv_cache[0].view(
        num_blocks, num_kv_heads, head_size // part, block_size, part
    )
    # step: cut the values into elements
    value_cache = kv_cache[1].view(num_blocks, num_kv_heads, head_size, block_size)
    return key_cache, value_cache
