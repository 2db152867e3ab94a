"""What is the cache made of, and how is it cut into blocks?

The memory of the cache is taken once, as raw bytes, when the engine starts; every layer then looks
at its bytes through a view. The view has five axes: keys and values, block, slot within the block,
head, element. A block is the unit that is handed out, shared, copied and taken back; a slot holds
one token's key (or value) of every head.
"""

import torch

from ..shared.refusals import check_not_negative, check_positive
from ..shared.shapes import KeyCache, KVCache, RawCache, ValueCache
from ..shared.specs import KVCacheSpec


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


def reshape_kv_cache(raw: RawCache, spec: KVCacheSpec) -> KVCache:
    """Return the bytes seen as a layer's cache; nothing is copied.

    Args:
        raw: [bytes] int8, a whole number of pages.
        spec: what a block holds.

    Returns:
        [2, num_blocks, block_size, kv_heads, head_size] view of `raw`.

    Raises:
        ValueError: the bytes are not a whole number of pages.

    Source:
        vLLM's `_reshape_kv_cache`.

    Example:
        >>> raw = torch.zeros(327680, dtype=torch.int8)
        >>> reshape_kv_cache(raw, KVCacheSpec(16, 8, 64, torch.float16)).shape
        torch.Size([2, 10, 16, 8, 64])
    """
    # step: count the pages
    num_blocks, rest = divmod(raw.numel(), spec.page_size_bytes)
    if rest:
        raise ValueError(
            f"raw has {raw.numel()} bytes: expected a multiple of {spec.page_size_bytes},"
            " the bytes of a page"
        )
    # step: look at the bytes as elements
    elements = raw.view(spec.dtype)
    # step: cut them into the five axes
    shape = get_kv_cache_shape(
        num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
    )
    return elements.view(shape)


def split_kv_cache(kv_cache: KVCache) -> tuple[KeyCache, ValueCache]:
    """Return the key half and the value half of a layer's cache; nothing is copied.

    Args:
        kv_cache: [2, num_blocks, block_size, kv_heads, head_size].

    Returns:
        Two views [num_blocks, block_size, kv_heads, head_size].

    Source:
        vLLM's `PagedAttention.split_kv_cache`.

    Example:
        >>> key_cache, value_cache = split_kv_cache(torch.zeros(2, 10, 16, 8, 64))
        >>> key_cache.shape
        torch.Size([10, 16, 8, 64])
    """
    return kv_cache[0], kv_cache[1]
