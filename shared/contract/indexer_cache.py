"""The indexer's cache: FP8 codes of one key per token, and a float32 scale for each.

A block of `block_size` tokens has the codes of all its tokens first, then the scales of all. As a
tensor it is [num_blocks, block_size, index_head_dim + 4] uint8, of which neither axis of the block
is that of a token.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
SMALLEST_SIZE = 1e-4
"""The largest size of a key counts as at least this number, before it is divided by 448."""


def split_indexer_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes and of the scales of an indexer's cache.

    Args:
        kv_cache: [num_blocks, block_size, index_head_dim + 4] uint8.

    Returns:
        [num_blocks, block_size, index_head_dim] uint8, and [num_blocks, block_size] float32.

    Example:
        >>> codes, scales = split_indexer_cache(torch.zeros(9, 64, 132, dtype=torch.uint8))
        >>> codes.shape, scales.shape
        (torch.Size([9, 64, 128]), torch.Size([9, 64]))
    """
    num_blocks, block_size, width = kv_cache.shape
    dim, block = width - SCALE_BYTES, kv_cache.stride(0)
    start = kv_cache.storage_offset()
    codes = kv_cache.as_strided((num_blocks, block_size, dim), (block, dim, 1), start)
    scales = kv_cache.as_strided(
        (num_blocks, block_size * SCALE_BYTES), (block, 1), start + block_size * dim
    )
    return codes, scales.view(torch.float32)
