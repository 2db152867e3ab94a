"""Block tables: the cache blocks of each request, in sequence order.

The cache is divided into blocks of `block_size` slots. Blocks are allocated one at a time as
sequences grow, so the blocks of a sequence are scattered over the cache. A request's row of the
block table lists its blocks in order: entry i is the block of positions i * block_size to
(i + 1) * block_size - 1. Rows have different lengths, and the table is as wide as the longest one.
Entries past the end of a row are padding and are never read.
"""

from collections.abc import Sequence

import torch

from ...contract.argument_types import typed
from ...contract.integers import WideInt
from ...contract.kinds import HOST
from ...contract.shapes import BlockCounts, BlockTable
from ...validation import (
    check_append_blocks,
    check_block_rows,
    check_not_negative,
    check_positive,
    validated,
)


@typed
def blocks_needed(num_tokens: WideInt, block_size: WideInt) -> int:
    """Return the number of blocks that hold a number of tokens.

    Args:
        num_tokens: tokens, from 0.
        block_size: slots in a block, from 1.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> blocks_needed(num_tokens=9, block_size=4)
        3
    """
    check_not_negative(num_tokens=num_tokens)
    check_positive(block_size=block_size)
    return -(-num_tokens // block_size)


@typed
def make_block_table(
    rows: Sequence[Sequence[int]],
    max_blocks: int | None = None,
    device: torch.device | str = "cpu",
) -> BlockTable:
    """Return the rows as one table, padded with 0.

    Args:
        rows: block ids of each request, in sequence order.
        max_blocks: Optional. Width of the table. If None, the length of the longest row.
        device: device of the table.

    Returns:
        [reqs, max_blocks] int32.

    Raises:
        IndexError: a row is longer than `max_blocks`, or a block id is negative.

    Source:
        vLLM's `make_tensor_with_pad` for block tables.

    Example:
        >>> make_block_table([[7, 2], [5]], max_blocks=3)
        tensor([[7, 2, 0],
                [5, 0, 0]], dtype=torch.int32)
    """
    if max_blocks is None:
        max_blocks = max((len(row) for row in rows), default=0)
    check_block_rows(rows, max_blocks)
    table = torch.zeros(len(rows), max_blocks, dtype=torch.int32, device=HOST)
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32, device=HOST)
    return table.to(device)


@validated(check_append_blocks)
def append_blocks(
    block_table: BlockTable,
    num_blocks: BlockCounts,
    new_blocks: Sequence[Sequence[int]],
) -> BlockCounts:
    """Append new blocks to the rows and return the new number of blocks per row.

    Args:
        block_table: [reqs, max_blocks], modified in place.
        num_blocks: [reqs] number of blocks in each row, on the host.
        new_blocks: block ids to append to each row. An empty list appends nothing.

    Returns:
        [reqs] int32, on the host.

    Raises:
        IndexError: a row would be longer than the table is wide, or a block id is negative. The
            table is not modified.
        ValueError: the number of lists is not the number of rows, or the counts are not on the
            host.

    Source:
        vLLM's `BlockTable.append_row`.

    Example:
        >>> append_blocks(
        ...     torch.tensor([[7, 2, 0], [5, 0, 0]], dtype=torch.int32),
        ...     torch.tensor([2, 1], dtype=torch.int32),
        ...     [[4], []],
        ... )
        tensor([3, 1], dtype=torch.int32)
    """
    counts = num_blocks.clone()
    for req, blocks in enumerate(new_blocks):
        held = int(num_blocks[req])
        for offset, block_id in enumerate(blocks):
            block_table[req, held + offset] = block_id
        counts[req] = held + len(blocks)
    return counts
