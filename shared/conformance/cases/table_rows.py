"""Block-table rows: sets of rows, and operations on persistent rows."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from .batches import GARBAGE

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class TableRows:
    """Rows of block ids, and what is appended to them.

    Args:
        rows, new: block ids that each request holds, and those that it gets.
        width: number of columns of the table.
        stride: elements from one entry to the next.
    """

    rows: tuple[tuple[int, ...], ...]
    new: tuple[tuple[int, ...], ...]
    width: int
    stride: int = 1

    def table(self, device: torch.device) -> Tensor:
        """Return the table as a view, with garbage after each row and between entries."""
        wide = torch.tensor(GARBAGE, dtype=torch.int32)
        wide = wide.repeat(len(self.rows), self.width * self.stride + 3)
        table = wide[:, 2 : 2 + self.width * self.stride : self.stride]
        for req, row in enumerate(self.rows):
            table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
        if device.type == "cpu":
            return table
        moved = wide.to(device)
        return moved.as_strided(table.shape, table.stride(), table.storage_offset())


@st.composite
def row_sets(draw: st.DrawFn) -> TableRows:
    """Return rows of any length up to the width of the table, with ids of any size."""
    pick = Random(draw(st.integers(0, 2**20)))
    reqs, width = pick.choice([0, 1, 2, 3, 6]), pick.choice([0, 1, 2, 5])

    def ids(count: int) -> tuple[int, ...]:
        return tuple(
            pick.choice([0, LARGEST, pick.randrange(100)]) for _ in range(count)
        )

    held = [pick.choice([0, width, pick.randint(0, width)]) for _ in range(reqs)]
    more = [pick.choice([0, 0, width - n, pick.randint(0, width - n)]) for n in held]
    return TableRows(
        tuple(map(ids, held)), tuple(map(ids, more)), width, pick.choice([1, 1, 2])
    )


Move = tuple[Any, ...]
"""A method of a BlockTable, and its arguments."""


@dataclass(frozen=True)
class Life:
    """The history of a block table while an engine runs.

    Args:
        block_size, kernel_block_size: slots per manager block, and per kernel block.
        reqs, width: number of rows, and capacity of each in manager blocks.
        ranks, interleave: ranks that share each sequence, and consecutive positions per rank.
        moves: the calls, in order.
    """

    block_size: int
    kernel_block_size: int | None
    reqs: int
    width: int
    ranks: int
    interleave: int
    moves: tuple[Move, ...]

    def table(self, candidate: Any, device: torch.device, rank: int) -> Any:
        """Return a table of empty rows."""
        options: dict[str, Any] = {}
        if self.kernel_block_size is not None:
            options["kernel_block_size"] = self.kernel_block_size
        if self.ranks > 1 or self.interleave > 1:
            options["dcp_world_size"] = self.ranks
            options["dcp_rank"] = rank
            options["dcp_kv_cache_interleave_size"] = self.interleave
        return candidate.BlockTable(
            self.block_size, self.reqs, self.width, device=device, **options
        )

    def entries(self, blocks: list[int]) -> list[int]:
        """Return the kernel block ids of a row of manager block ids."""
        per_block = self.block_size // (self.kernel_block_size or self.block_size)
        return [
            block * per_block + part for block in blocks for part in range(per_block)
        ]

    def slots(self, blocks: list[int], rank: int) -> list[int]:
        """Return a rank's slot for every position that a row of manager blocks holds.

        A rank stores its own positions in consecutive slots of its blocks.
        """
        size = self.kernel_block_size or self.block_size
        entries, slots, filled = self.entries(blocks), [], 0
        for position in range(len(entries) * size * self.ranks):
            if position // self.interleave % self.ranks == rank:
                slots.append(entries[filled // size] * size + filled % size)
                filled += 1
            else:
                slots.append(PAD_SLOT_ID)
        return slots


def make_move(rows: list[list[int]], move: Move) -> None:
    """Change plain lists as the method of a table changes its rows."""
    name, *given = move
    if name == "append_row":
        rows[given[1]] = rows[given[1]] + list(given[0])
    elif name == "add_row":
        rows[given[1]] = list(given[0])
    elif name == "move_row":
        rows[given[1]] = list(rows[given[0]])
    elif name == "swap_row":
        rows[given[0]], rows[given[1]] = rows[given[1]], rows[given[0]]
    else:
        rows[:] = [[] for _ in rows]


@st.composite
def lives(draw: st.DrawFn) -> Life:
    """Return moves that fill rows completely, reuse them after longer rows, and copy them."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = pick.choice([1, 2, 4, 6])
    interleave = pick.choice([size for size in (1, 2, 3, 4) if kernel % size == 0])
    per_block = pick.choice([1, 1, 2, 3])
    reqs, width = pick.choice([1, 2, 3, 4]), pick.choice([1, 2, 3])
    top = pick.choice([64, (LARGEST + 1) // per_block])
    rows: list[list[int]] = [[] for _ in range(reqs)]
    moves: list[Move] = []
    req = other = 0
    for _ in range(pick.choice([1, 5, 9, 25])):
        # the source or the destination of a copy is changed next
        again = [req, other] if pick.random() < 0.5 else range(reqs)
        req, other = pick.choice(again), pick.randrange(reqs)
        name = pick.choice(["append_row"] * 3 + ["add_row"] * 3 + ["move", "swap"] * 2)
        room = width - len(rows[req]) if name == "append_row" else width
        count = pick.choice([room, pick.randint(0, room)])
        blocks = tuple(pick.randrange(top - 64, top) for _ in range(count))
        move: Move = (f"{name}_row", req, other)
        if name in ("append_row", "add_row"):
            move = (name, blocks, req)
        elif pick.random() < 0.1:
            move = ("clear",)
        moves.append(move)
        make_move(rows, move)
    is_same = per_block == 1 and pick.random() < 0.5
    return Life(
        block_size=kernel * per_block,
        kernel_block_size=None if is_same else kernel,
        reqs=reqs,
        width=width,
        ranks=pick.choice([1, 1, 2, 3]),
        interleave=interleave,
        moves=tuple(moves),
    )
