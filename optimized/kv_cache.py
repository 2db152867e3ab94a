"""What is the cache made of, and how is it cut into blocks?

Views cost nothing, so there is nothing to make faster: the same views of the same bytes.
"""

import torch

from ..shared.refusals import check_not_negative, check_positive
from ..shared.shapes import KeyCache, KVCache, RawCache, ValueCache
from ..shared.specs import KVCacheSpec


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


def reshape_kv_cache(raw: RawCache, spec: KVCacheSpec) -> KVCache:
    """Return the bytes seen as a layer's cache; nothing is copied."""
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
    """Return the key half and the value half of a layer's cache; nothing is copied."""
    return kv_cache[0], kv_cache[1]
