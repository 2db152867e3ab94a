"""Puzzle 2: new blocks in the block table."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ....contract.operations import load_implementation
from ..puzzle import Case, Function, Hint, Puzzle

TEMPLATE = '''\
"""Puzzle 2: new blocks in the block table.

A sequence grows and gets new blocks. Each row of the block table lists the blocks of one
request. All rows have the same width, so a row ends with entries that are not in use.
"""

import torch
from torch import Tensor


def append_blocks(
    block_table: Tensor, num_blocks: Tensor, new_blocks: list[list[int]]
) -> Tensor:
    """Append new blocks to the rows of a block table. Return the new lengths of the rows.

    The tensors may have any strides: they need not be contiguous.

    Args:
        block_table: [reqs, max_blocks] int32 block ids, modified in place.
        num_blocks: [reqs] int32 number of entries in use in each row. Only read.
        new_blocks: block ids to append, one list per row. A list may be empty.

    Returns:
        [reqs] int32 number of entries in use afterwards.

    Example:
        Row 0 has 2 entries in use, so block 4 becomes its entry 2.

        >>> block_table = torch.tensor([[7, 2, 0], [5, 0, 0]], dtype=torch.int32)
        >>> num_blocks = torch.tensor([2, 1], dtype=torch.int32)
        >>> append_blocks(block_table, num_blocks, [[4], []])
        tensor([3, 1], dtype=torch.int32)
        >>> block_table
        tensor([[7, 2, 4],
                [5, 0, 0]], dtype=torch.int32)
    """
    raise NotImplementedError
'''


def right(
    block_table: Tensor, num_blocks: Tensor, new_blocks: list[list[int]]
) -> Tensor:
    """Return the reference's counts, after its change of the table."""
    found: Tensor = load_implementation("reference").append_blocks(
        block_table, num_blocks, new_blocks
    )
    return found


def cases() -> Iterator[Case]:
    """Yield every table of 1 or 2 rows and 1 to 3 columns, the smallest first."""
    for reqs, width in sorted(product((1, 2), (1, 2, 3)), key=lambda size: sum(size)):
        counts = [
            (held, new)
            for held in range(width + 1)
            for new in range(width - held + 1)
            if held + new
        ]
        for rows in product(counts, repeat=reqs):
            if not any(new for _, new in rows):
                continue
            table = torch.zeros(reqs, width, dtype=torch.int32)
            new_blocks = []
            for req, (held, new) in enumerate(rows):
                table[req, :held] = torch.arange(10 * req + 1, 10 * req + 1 + held)
                new_blocks.append([10 * req + 5 + index for index in range(new)])
            yield {
                "block_table": table,
                "num_blocks": torch.tensor(
                    [held for held, _ in rows], dtype=torch.int32
                ),
                "new_blocks": new_blocks,
            }


def written_at(
    block_table: Tensor, starts: list[int], new_blocks: list[list[int]]
) -> None:
    """Write the new blocks of each row from another entry on."""
    for req, blocks in enumerate(new_blocks):
        for offset, block_id in enumerate(blocks):
            block_table[req, starts[req] + offset] = block_id


def overwritten(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Write the new blocks over the first ones."""
    counts = right(block_table.clone(), num_blocks, new_blocks)
    written_at(block_table, [0] * len(num_blocks), new_blocks)
    return counts


def one_late(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Leave one entry free."""
    counts = right(block_table.clone(), num_blocks, new_blocks)
    written_at(block_table, [held + 1 for held in num_blocks.tolist()], new_blocks)
    return counts


def one_early(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Overwrite the last entry in use."""
    counts = right(block_table.clone(), num_blocks, new_blocks)
    written_at(block_table, [held - 1 for held in num_blocks.tolist()], new_blocks)
    return counts


def same_start(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Write in all rows from the end of the first one."""
    counts = right(block_table.clone(), num_blocks, new_blocks)
    written_at(block_table, [int(num_blocks[0])] * len(num_blocks), new_blocks)
    return counts


def last_only(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Write all new blocks of a row to the same entry."""
    counts = right(block_table.clone(), num_blocks, new_blocks)
    for req, blocks in enumerate(new_blocks):
        written_at(block_table[req:], [int(num_blocks[req])], [blocks[-1:]])
    return counts


def old_counts(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Return the lengths before the call."""
    right(block_table, num_blocks, new_blocks)
    return num_blocks.clone()


def new_counts(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Return the numbers of new blocks."""
    return right(block_table, num_blocks, new_blocks) - num_blocks


def not_in_place(block_table: Tensor, num_blocks: Tensor, new_blocks: Any) -> Tensor:
    """Leave the table unchanged."""
    return right(block_table.clone(), num_blocks, new_blocks)


def operations(function: Function) -> dict[str, Function]:
    """Return pagetwin's operation, which is the function."""
    return {"append_blocks": function}


PUZZLE = Puzzle(
    number=2,
    name="append_blocks",
    title="new blocks in the block table",
    page="concepts/block_table",
    template=TEMPLATE,
    results={"new lengths": ("row",)},
    modified={"block_table": ("row", "entry")},
    cases=cases,
    right=right,
    hints=(
        Hint(
            "overwrite",
            "The new blocks replaced the first ones, whose keys and values are still needed."
            " Append after the entries in use.",
            overwritten,
        ),
        Hint(
            "block_edge_late",
            "A row with n entries in use has the entries 0 to n - 1. The next free entry is n,"
            " not n + 1.",
            one_late,
        ),
        Hint(
            "block_edge_early",
            "The last entry in use was replaced. Entries count from 0, so n entries end at"
            " entry n - 1, and entry n is free.",
            one_early,
        ),
        Hint(
            "row_length",
            "Every row has its own length. This result fits the length of row 0.",
            same_start,
        ),
        Hint(
            "one_entry",
            "A row can get more than one new block. All of them were written to one entry.",
            last_only,
        ),
        Hint(
            "old_counts",
            "The table is right. The returned lengths are those before the call.",
            old_counts,
        ),
        Hint(
            "only_new",
            "The table is right. The returned numbers count only the new blocks, not the"
            " whole row.",
            new_counts,
        ),
        Hint(
            "in_place",
            "The table did not change. It is modified in place: the caller uses the same"
            " tensor in the next step.",
            not_in_place,
        ),
    ),
    idea="Take one row and its length n. Which entries are in use, and which is the first free"
    " one? num_blocks is only read, so count in another tensor.",
    operations=operations,
    laws=("new blocks are appended to their row and nothing else changes",),
    law_hint="The small cases are right. The entries past the end of a row may hold any number,"
    " and there may be no rows at all.",
)
