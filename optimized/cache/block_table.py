"""Block tables: the cache blocks of each request, in sequence order.

Rows are written into one numpy array and copied to the device once. Long rows are written one at a
time, short ones all at once.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from ...contract.argument_types import typed
from ...contract.shapes import BlockCounts, BlockTable
from ...reference.cache.block_table import blocks_needed as blocks_needed
from ...validation import (
    check_append_blocks,
    check_block_rows,
)

_SHORT_ROW = 64


@typed
def make_block_table(
    rows: Sequence[Sequence[int]],
    max_blocks: int | None = None,
    device: torch.device | str = "cpu",
) -> BlockTable:
    """Return the rows as one table, padded with 0."""
    if max_blocks is None:
        max_blocks = max((len(row) for row in rows), default=0)
    return torch.from_numpy(padded_rows(rows, max_blocks)).to(device)


@typed
def append_blocks(
    block_table: BlockTable,
    num_blocks: BlockCounts,
    new_blocks: Sequence[Sequence[int]],
) -> BlockCounts:
    """Append new blocks to the rows and return the new number of blocks per row.

    All new blocks of the batch are copied to the device once and written by one indexed store.
    """
    check_append_blocks(block_table, num_blocks, new_blocks)
    added = np.fromiter(map(len, new_blocks), np.int64, len(new_blocks))
    held = num_blocks.numpy()
    req = np.arange(len(added)).repeat(added)
    column = np.arange(len(req)) + (held - added.cumsum() + added).repeat(added)
    block_ids = np.fromiter(chain.from_iterable(new_blocks), np.int64, len(req))
    entries = torch.from_numpy(np.stack([req, column, block_ids]))
    entries = entries.to(block_table.device)
    block_table[entries[0], entries[1]] = entries[2].to(torch.int32)
    return torch.from_numpy((held + added).astype(np.int32))


def padded_rows(rows: Sequence[Sequence[int]], max_blocks: int) -> np.ndarray:
    """Return the rows as one int32 array, padded with 0.

    The ids are validated in the array, since a loop over the lists takes longer than the rest.
    """
    lens = np.fromiter(map(len, rows), np.int64, len(rows))
    if lens.max(initial=0) > max_blocks:
        check_block_rows(rows, max_blocks)
    table = np.zeros((len(rows), max_blocks), dtype=np.int32)
    num_ids = int(lens.sum())
    try:
        if num_ids <= _SHORT_ROW * len(rows):
            # one numpy call per row would take longer than one pass over the ids
            owned = np.arange(max_blocks) < lens[:, None]
            table[owned] = np.fromiter(chain.from_iterable(rows), np.int32, num_ids)
        else:
            for req, row in enumerate(rows):
                table[req, : len(row)] = row
    except OverflowError:
        check_block_rows(rows, max_blocks)
        raise
    if table.min(initial=0) < 0:
        check_block_rows(rows, max_blocks)
    return table
