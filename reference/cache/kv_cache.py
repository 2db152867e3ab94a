"""KV cache: its shape, memory layout and views.

The memory of a cache is allocated once, as raw bytes, when the engine starts. Each layer accesses
its bytes through a view with five axes: keys and values, block, slot in the block, head, element.
A block is the unit that is allocated, shared, copied and freed. A slot holds the key (or value) of
one token for all heads. The memory layout is the order of these axes in memory. It changes the
strides of the view and nothing else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.layouts import (
    KVCacheLayout,
    compute_kv_cache_shape_bytes,
    compute_layout_strides,
)
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
from ...validation.kv_cache import (
    check_halves,
    check_no_padding,
    check_packed,
    check_plain_cells,
    check_view,
    check_whole_pages,
)


@typed
def get_kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int, int]:
    """Return the shape of a layer's cache, which has five axes.

    Args:
        num_blocks: blocks in the cache, at least 0.
        block_size: slots in a block, at least 1.
        num_kv_heads: key/value heads, at least 1.
        head_size: elements of a head, at least 1.

    Raises:
        ValueError: a number is out of range.

    Source:
        vLLM's method of that name on its attention backends.

    Example:
        >>> get_kv_cache_shape(
        ...     num_blocks=10, block_size=16, num_kv_heads=8, head_size=64
        ... )
        (2, 10, 16, 8, 64)
    """
    check_not_negative(num_blocks=num_blocks)
    check_positive(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size
    )
    return (2, num_blocks, block_size, num_kv_heads, head_size)


@typed
def allocate_kv_cache(
    spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu"
) -> RawCache:
    """Return the bytes of one layer's cache, all zero.

    Args:
        spec: content of a block.
        num_blocks: blocks in the cache, at least 0.
        device: device of the cache.

    Returns:
        [num_blocks * spec.page_size_bytes] int8.

    Raises:
        ValueError: a negative number of blocks.

    Source:
        vLLM's `_allocate_kv_cache`.

    Example:
        >>> spec = KVCacheSpec(16, 8, 64, torch.float16)
        >>> allocate_kv_cache(spec, num_blocks=10).shape
        torch.Size([327680])
    """
    check_not_negative(num_blocks=num_blocks)
    num_bytes = num_blocks * spec.page_size_bytes
    return torch.zeros(num_bytes, dtype=torch.int8, device=device)


@typed
def view_kv_cache(
    raw: RawCache,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride_order: Sequence[int],
) -> Tensor:
    """Return a view of bytes as a tensor with a given order of its axes in memory.

    Args:
        raw: [bytes] int8.
        dtype: of the elements.
        shape: lengths of the axes in the order in which code indexes them. They must cover all
            bytes.
        stride_order: the axes, the outermost in memory first.

    Returns:
        A view of `raw`; nothing is copied.

    Raises:
        ValueError: the shape does not cover all bytes, or the order is not a permutation.

    Source:
        vLLM's `get_kv_cache_stride_order` and `_reshape_kv_cache`.

    Example:
        >>> raw = torch.arange(6, dtype=torch.int8)
        >>> view_kv_cache(raw, torch.int8, shape=(2, 3), stride_order=(1, 0))
        tensor([[0, 2, 4],
                [1, 3, 5]], dtype=torch.int8)
    """
    check_view(raw, dtype, shape, stride_order)
    elements = raw.view(dtype)
    # step: view the bytes with the axes in memory order
    in_memory = elements.view([shape[axis] for axis in stride_order])
    # step: permute the axes to the order of the shape
    return in_memory.permute([stride_order.index(axis) for axis in range(len(shape))])


@typed
def reshape_kv_cache(
    raw: RawCache,
    spec: KVCacheSpec,
    stride_order: Sequence[int] = (0, 1, 2, 3, 4),
) -> KVCache:
    """Return the bytes as a layer's cache; nothing is copied.

    Args:
        raw: [bytes] int8, a whole number of pages.
        spec: content of a block.
        stride_order: the five axes, the outermost in memory first.

    Returns:
        [2, num_blocks, block_size, kv_heads, stored_head_size] view of `raw`.

    Raises:
        ValueError: the bytes are not a whole number of pages, the order is not a permutation, a
            slot does not hold a key and a value of `head_size` elements, or pages are padded
            (`reshape_layered_kv_cache` supports padding).

    Source:
        vLLM's `_reshape_kv_cache`.

    Example:
        >>> raw = torch.zeros(327680, dtype=torch.int8)
        >>> reshape_kv_cache(raw, KVCacheSpec(16, 8, 64, torch.float16)).shape
        torch.Size([2, 10, 16, 8, 64])
    """
    check_plain_cells(spec)
    check_no_padding(spec)
    # step: count the pages
    num_blocks = check_whole_pages("raw", raw, spec.page_size_bytes)
    # step: view them with the five axes
    shape = get_kv_cache_shape(
        num_blocks, spec.block_size, spec.num_kv_heads, spec.stored_head_size
    )
    return view_kv_cache(raw, spec.dtype, shape, stride_order)


@typed
def reshape_layered_kv_cache(
    raw: RawCache,
    spec: KVCacheSpec,
    num_layers: int,
    layout: KVCacheLayout,
    kernel_block_size: int | None = None,
) -> LayeredKVCache:
    """Return the bytes of one allocation as the caches of many layers.

    Args:
        raw: [bytes] int8, a whole number of pages of every layer.
        spec: content of a block of one layer.
        num_layers: number of layers, at least 1.
        layout: order of layer, block, head, slot and content in memory.
        kernel_block_size: Optional. Slots in a block of the kernels, which divides the block of
            the engine. If None, both are the same.

    Returns:
        [layers, 2, num_blocks, block_size, kv_heads, stored_head_size] view of `raw`. An entry of
        the first axis is a layer's cache. Key and value of a slot and head are adjacent in memory.
        No element is in the padding of a page. With a kernel block size, blocks are the kernel's.

    Raises:
        ValueError: the bytes are not a whole number of pages of every layer, the layout divides
            pages that are padded, or a slot does not hold a key and a value of `head_size`
            elements.

    Source:
        vLLM 0.33's single allocation for all layers, and its `KVCacheLayout`.

    Example:
        >>> spec = KVCacheSpec(16, 8, 64, torch.float16)
        >>> raw = torch.zeros(4 * 10 * 32768, dtype=torch.int8)
        >>> caches = reshape_layered_kv_cache(
        ...     raw, spec, num_layers=4, layout=KVCacheLayout.BLNHC
        ... )
        >>> caches[0].shape
        torch.Size([2, 10, 16, 8, 64])
    """
    check_positive(num_layers=num_layers)
    check_plain_cells(spec)
    # step: count the pages
    num_blocks = check_whole_pages("raw", raw, num_layers * spec.page_size_bytes)
    # step: view layer, block, head, slot and content
    sizes = compute_kv_cache_shape_bytes(spec, num_blocks, kernel_block_size)
    strides = compute_layout_strides(
        spec, num_blocks, num_layers, layout, kernel_block_size
    )
    cells = raw.as_strided((num_layers, *sizes), strides).view(spec.dtype)
    # step: split the content into key and value
    halves = cells.view(*cells.shape[:4], 2, spec.stored_head_size)
    return halves.permute(0, 4, 1, 3, 2, 5)


@typed
def split_kv_cache(kv_cache: KVCache) -> tuple[KeyCache, ValueCache]:
    """Return the keys and the values of a layer's cache; nothing is copied.

    Args:
        kv_cache: [2, num_blocks, block_size, kv_heads, head_size].

    Returns:
        Two views [num_blocks, block_size, kv_heads, head_size].

    Source:
        vLLM's V1 backends, which unbind the first axis.

    Example:
        >>> key_cache, value_cache = split_kv_cache(torch.zeros(2, 10, 16, 8, 64))
        >>> key_cache.shape
        torch.Size([10, 16, 8, 64])
    """
    check_halves(kv_cache)
    return kv_cache[0], kv_cache[1]


@typed
def get_packed_kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int]:
    """Return the shape of a layer's cache in the packed format of vLLM's first kernels.

    Args:
        num_blocks: blocks in the cache, at least 0.
        block_size: slots in a block, at least 1.
        num_kv_heads: key/value heads, at least 1.
        head_size: elements of a head, at least 1.

    Raises:
        ValueError: a number is out of range.

    Source:
        vLLM's `PagedAttention.get_kv_cache_shape`.

    Example:
        >>> get_packed_kv_cache_shape(
        ...     num_blocks=2, block_size=4, num_kv_heads=2, head_size=16
        ... )
        (2, 2, 128)
    """
    two, blocks, slots, heads, elements = get_kv_cache_shape(
        num_blocks, block_size, num_kv_heads, head_size
    )
    return (two, blocks, slots * heads * elements)


@typed
def split_packed_kv_cache(
    kv_cache: PackedKVCache, num_kv_heads: int, head_size: int
) -> tuple[PackedKeyCache, PackedValueCache]:
    """Return the key view and the value view of a cache in the packed format.

    The kernels of that format read 16 bytes at a time. A head's key is divided into groups of 16
    bytes, and the same group of all slots is contiguous. Of the values, the same element of all
    slots is contiguous.

    Args:
        kv_cache: [2, num_blocks, block_size * kv_heads * head_size].
        num_kv_heads: key/value heads, at least 1.
        head_size: elements of a head, a whole number of groups.

    Returns:
        Views [num_blocks, kv_heads, groups, block_size, group] and
        [num_blocks, kv_heads, head_size, block_size].

    Raises:
        ValueError: the heads do not fill the groups or the blocks.

    Source:
        vLLM's `PagedAttention.split_kv_cache`, where the size of a group is `x`.

    Example:
        >>> kv_cache = torch.zeros(2, 2, 128, dtype=torch.float16)
        >>> key_cache, value_cache = split_packed_kv_cache(
        ...     kv_cache, num_kv_heads=2, head_size=16
        ... )
        >>> key_cache.shape
        torch.Size([2, 2, 2, 4, 8])
        >>> value_cache.shape
        torch.Size([2, 2, 16, 4])
    """
    check_packed(kv_cache, num_kv_heads, head_size)
    _, num_blocks, block_elements = kv_cache.shape
    # step: compute the block size and the elements per 16 bytes
    block_size = block_elements // (num_kv_heads * head_size)
    group = 16 // kv_cache.element_size()
    # step: view the keys in groups of 16 bytes
    key_cache = kv_cache[0].view(
        num_blocks, num_kv_heads, head_size // group, block_size, group
    )
    # step: view the values by element
    value_cache = kv_cache[1].view(num_blocks, num_kv_heads, head_size, block_size)
    return key_cache, value_cache
