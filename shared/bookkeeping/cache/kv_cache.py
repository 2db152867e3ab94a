"""KV cache: its shape, memory layout and views.

The memory of the cache is taken once, as raw bytes, when the engine starts; every layer then looks
at its bytes through a view. The view has five axes: keys and values, block, slot within the block,
head, element. A block is the unit that is handed out, shared, copied and taken back; a slot holds
one token's key (or value) of every head. In which order the axes lie in memory is a choice of its
own (the layout): it changes the strides of the view and nothing else.
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
    """Return the five axes of a layer's cache.

    Args:
        num_blocks: blocks in the cache, from 0.
        block_size: slots in a block, from 1.
        num_kv_heads: key/value heads, from 1.
        head_size: elements of a head, from 1.

    Raises:
        ValueError: a number out of range.

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


def allocate_kv_cache(
    spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu"
) -> RawCache:
    """Return the bytes of one layer's cache, all zero.

    Args:
        spec: what a block holds.
        num_blocks: blocks in the cache, from 0.
        device: where the cache shall lie.

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


def view_kv_cache(
    raw: RawCache,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride_order: Sequence[int],
) -> Tensor:
    """Return bytes seen as a tensor whose axes lie in memory in a given order.

    Args:
        raw: [bytes] int8.
        dtype: of the elements.
        shape: lengths of the axes as code indexes them; together all of the bytes.
        stride_order: the axes, the outermost in memory first.

    Returns:
        View of `raw`; nothing is copied.

    Raises:
        ValueError: the shape is not all of the bytes, or the order no permutation.

    Source:
        vLLM's `get_kv_cache_stride_order`, undone in `_reshape_kv_cache`.

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


def reshape_kv_cache(
    raw: RawCache,
    spec: KVCacheSpec,
    stride_order: Sequence[int] = (0, 1, 2, 3, 4),
) -> KVCache:
    """Return the bytes seen as a layer's cache; nothing is copied.

    Args:
        raw: [bytes] int8, a whole number of pages.
        spec: what a block holds.
        stride_order: the five axes, the outermost in memory first.

    Returns:
        [2, num_blocks, block_size, kv_heads, head_size] view of `raw`.

    Raises:
        ValueError: the bytes are not a whole number of pages, or the order no permutation.

    Source:
        vLLM's `_reshape_kv_cache`.

    Example:
        >>> raw = torch.zeros(327680, dtype=torch.int8)
        >>> reshape_kv_cache(raw, KVCacheSpec(16, 8, 64, torch.float16)).shape
        torch.Size([2, 10, 16, 8, 64])
    """
    # step: count the pages
    num_blocks = check_whole_pages("raw", raw, spec.page_size_bytes)
    # step: view them with the five axes
    shape = get_kv_cache_shape(
        num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
    )
    return view_kv_cache(raw, spec.dtype, shape, stride_order)


def reshape_layered_kv_cache(
    raw: RawCache, spec: KVCacheSpec, num_layers: int, layout: KVCacheLayout
) -> LayeredKVCache:
    """Return the bytes of one allocation seen as the caches of many layers.

    Args:
        raw: [bytes] int8, a whole number of pages of every layer.
        spec: what a block of one layer holds.
        num_layers: layers, from 1.
        layout: the order of layer, block, head, slot and content in memory.

    Returns:
        [layers, 2, num_blocks, block_size, kv_heads, head_size] view of `raw`; an entry of the
        first axis is a layer's cache. A slot's key and value of one head lie side by side.

    Raises:
        ValueError: the bytes are not a whole number of pages of every layer.

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
    # step: count the pages
    num_blocks = check_whole_pages("raw", raw, num_layers * spec.page_size_bytes)
    # step: view layer, block, head, slot and content
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
    """Return the key half and the value half of a layer's cache; nothing is copied.

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
    return kv_cache[0], kv_cache[1]


def get_packed_kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int]:
    """Return the three axes of a layer's cache in the first kernels' form.

    Args:
        num_blocks: blocks in the cache, from 0.
        block_size: slots in a block, from 1.
        num_kv_heads: key/value heads, from 1.
        head_size: elements of a head, from 1.

    Raises:
        ValueError: a number out of range.

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


def split_packed_kv_cache(
    kv_cache: PackedKVCache, num_kv_heads: int, head_size: int
) -> tuple[PackedKeyCache, PackedValueCache]:
    """Return the key view and the value view of a cache in the first kernels' form.

    Those kernels read 16 bytes at a time. So a head's key is cut into parts of 16 bytes, and the
    same part of all slots lies together; of the values, the same element of all slots does.

    Args:
        kv_cache: [2, num_blocks, block_size * kv_heads * head_size].
        num_kv_heads: key/value heads, from 1.
        head_size: elements of a head, a whole number of parts.

    Returns:
        Views [num_blocks, kv_heads, parts, block_size, part] and
        [num_blocks, kv_heads, head_size, block_size].

    Raises:
        ValueError: heads that do not fill the parts or the blocks.

    Source:
        vLLM's `PagedAttention.split_kv_cache`, where a part is called x.

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
    part = 16 // kv_cache.element_size()
    # step: view the keys in groups of 16 bytes
    key_cache = kv_cache[0].view(
        num_blocks, num_kv_heads, head_size // part, block_size, part
    )
    # step: view the values by element
    value_cache = kv_cache[1].view(num_blocks, num_kv_heads, head_size, block_size)
    return key_cache, value_cache
