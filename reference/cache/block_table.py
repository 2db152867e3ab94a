"""Block tables: the cache blocks of each request, in sequence order.

The cache is cut into blocks of `block_size` slots, and blocks are handed out one by one, as
sequences grow, wherever one is free. So a sequence lies scattered over the cache, and its row of
the block table lists its blocks in order: entry i holds the block of positions
i * block_size to (i + 1) * block_size - 1. Rows have different lengths; the table is as wide as
the longest, and what stands behind a row's end means nothing and is never read.
"""

from collections.abc import Sequence

import torch

from ...bookkeeping.cache.block_table import blocks_needed as blocks_needed
from ...contract.kinds import HOST
from ...contract.shapes import BlockCounts, BlockTable
from ...validation import (
    check_append_blocks,
    check_block_rows,
)


def make_block_table(
    rows: Sequence[Sequence[int]],
    max_blocks: int | None = None,
    device: torch.device | str = "cpu",
) -> BlockTable:
    """Return the rows as one table, padded with 0 behind each row.

    Args:
        rows: for each request its block ids, in sequence order.
        max_blocks: width of the table; None: the longest row.
        device: where the table shall lie.

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


def append_blocks(
    block_table: BlockTable,
    num_blocks: BlockCounts,
    new_blocks: Sequence[Sequence[int]],
) -> BlockCounts:
    """Write new blocks behind the rows and return how many blocks each row holds then.

    Args:
        block_table: [reqs, max_blocks], changed.
        num_blocks: [reqs] blocks that each row holds, on the host, where they are handed out.
        new_blocks: for each request the ids to append; an empty list where it needs none.

    Returns:
        [reqs] int32, on the host.

    Raises:
        IndexError: a row would outgrow the table, or a block id is negative; the table stays
            as it was.
        ValueError: not one list a row, or counts that lie elsewhere.

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
    check_append_blocks(block_table, num_blocks, new_blocks)
    counts = num_blocks.clone()
    for req, blocks in enumerate(new_blocks):
        held = int(num_blocks[req])
        for offset, block_id in enumerate(blocks):
            block_table[req, held + offset] = block_id
        counts[req] = held + len(blocks)
    return counts
