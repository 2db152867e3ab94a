"""Which blocks of the cache does each request own?

Rows are written into one numpy array, a whole row at a time, and sent to the device once.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..shared.refusals import (
    check_append_blocks,
    check_block_rows,
    check_not_negative,
    check_positive,
)
from ..shared.shapes import BlockCounts, BlockTable


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold that many tokens."""
    check_not_negative(num_tokens=num_tokens)
    check_positive(block_size=block_size)
    return -(-num_tokens // block_size)


def make_block_table(
    rows: Sequence[Sequence[int]],
    max_blocks: int | None = None,
    device: torch.device | str = "cpu",
) -> BlockTable:
    """Return the rows as one table, padded with 0 behind each row."""
    if max_blocks is None:
        max_blocks = max((len(row) for row in rows), default=0)
    check_block_rows(rows, max_blocks)
    return torch.from_numpy(padded_rows(rows, max_blocks)).to(device)


def append_blocks(
    block_table: BlockTable,
    num_blocks: BlockCounts,
    new_blocks: Sequence[Sequence[int]],
) -> BlockCounts:
    """Write new blocks behind the rows and return how many blocks each row holds then.

    All new blocks of the batch are sent in one copy and written in one indexed store.
    """
    check_append_blocks(block_table, num_blocks, new_blocks)
    added = np.fromiter(
        (len(blocks) for blocks in new_blocks), np.int64, len(new_blocks)
    )
    held = num_blocks.numpy(force=True)
    req = np.repeat(np.arange(len(added)), added)
    column = held[req] + np.arange(added.sum()) - (added.cumsum() - added)[req]
    block_ids = np.concatenate([np.empty(0, np.int32), *map(_as_ids, new_blocks)])
    device = block_table.device
    entries = torch.from_numpy(np.stack([req, column, block_ids])).to(device)
    block_table[entries[0], entries[1]] = entries[2].to(torch.int32)
    return torch.from_numpy((held + added).astype(np.int32)).to(num_blocks.device)


def padded_rows(rows: Sequence[Sequence[int]], max_blocks: int) -> np.ndarray:
    """Return the rows as one int32 array, padded with 0."""
    table = np.zeros((len(rows), max_blocks), dtype=np.int32)
    for req, row in enumerate(rows):
        table[req, : len(row)] = row
    return table


def _as_ids(blocks: Sequence[int]) -> np.ndarray:
    return np.asarray(blocks, dtype=np.int32)
