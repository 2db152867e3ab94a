"""Puzzle 1: slot mapping."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ....contract.kinds import PAD_SLOT_ID
from ....contract.operations import load_implementation
from ..puzzle import Case, Function, Hint, Puzzle

TEMPLATE = '''\
"""Puzzle 1: slot mapping.

The KV cache is an array of slots, divided into blocks of block_size slots. The blocks of a
sequence are anywhere in the cache. Its block table lists them in order: entry 0 is the block
of the first block_size positions, entry 1 that of the next ones.
"""

import torch
from torch import Tensor


def slot_mapping(
    block_table: list[int],
    context_len: int,
    seq_len: int,
    start_idx: int,
    block_size: int,
) -> Tensor:
    """Return the cache slot of every new token of one sequence.

    Args:
        block_table: block ids of the sequence, in order.
        context_len: tokens that are in the cache already. The new tokens are those at the
            positions context_len to seq_len - 1.
        seq_len: tokens of the sequence, the new ones included.
        start_idx: first position that is stored. A new token before it gets slot -1.
        block_size: slots per block.

    Returns:
        [seq_len - context_len] int64. Slot s is offset s % block_size of block s // block_size.

    Example:
        Positions 3 to 6 are new, and position 3 is not stored. Position 4 is the first of
        the second block, which is block 2, so it gets slot 2 * 4 + 0 = 8.

        >>> slot_mapping([7, 2], context_len=3, seq_len=7, start_idx=4, block_size=4)
        tensor([-1,  8,  9, 10])
    """
    raise NotImplementedError
'''


def right(
    block_table: list[int],
    context_len: int,
    seq_len: int,
    start_idx: int,
    block_size: int,
) -> Tensor:
    """Return the reference's slots."""
    found: Tensor = load_implementation("reference").compute_slot_mapping(
        False, seq_len, context_len, start_idx, block_size, block_table
    )
    return found


def cases() -> Iterator[Case]:
    """Yield every sequence of at most 5 tokens in blocks of 1 to 3 slots, the shortest first."""
    sizes = [
        (seq_len, block_size, context_len, start_idx)
        for seq_len in range(1, 6)
        for block_size in (2, 1, 3)
        for context_len in range(seq_len + 1)
        for start_idx in range(seq_len + 1)
    ]
    # a call without new tokens comes last
    for seq_len, block_size, context_len, start_idx in sorted(
        sizes, key=lambda size: size[2] == size[0]
    ):
        yield {
            "block_table": [3, 1, 4, 0, 2][: -(-seq_len // block_size)],
            "context_len": context_len,
            "seq_len": seq_len,
            "start_idx": start_idx,
            "block_size": block_size,
        }


def changed(
    **changes: Callable[[Case], Any],
) -> Function:
    """Return a function that gives the right slots of changed arguments."""

    def wrong(**case: Any) -> Tensor:
        return right(
            **(case | {name: change(case) for name, change in changes.items()})
        )

    return wrong


def by_entry(entry: Callable[[int, int], int]) -> Function:
    """Return a function that looks up another entry of the block table.

    Args:
        entry: The entry, from the position and the block size.
    """

    def wrong(**case: Any) -> Tensor:
        size = case["block_size"]
        positions = range(case["context_len"], case["seq_len"])
        return torch.tensor(
            [
                PAD_SLOT_ID
                if place < case["start_idx"]
                else case["block_table"][entry(place, size)] * size + place % size
                for place in positions
            ],
            dtype=torch.int64,
        )

    return wrong


def without_offset(**case: Any) -> Tensor:
    """Return the first slot of each block."""
    slots, size = right(**case), case["block_size"]
    return torch.where(slots < 0, slots, slots // size * size)


def block_ids(**case: Any) -> Tensor:
    """Return the block id instead of the slot."""
    slots, size = right(**case), case["block_size"]
    return torch.where(slots < 0, slots, slots // size)


def added(**case: Any) -> Tensor:
    """Return the sum of block id and offset."""
    slots, size = right(**case), case["block_size"]
    return torch.where(slots < 0, slots, slots // size + slots % size)


def operations(function: Function) -> dict[str, Function]:
    """Return pagetwin's operations, computed by the function."""

    def one(
        is_profile_run: bool,
        seq_len: int,
        context_len: int,
        start_idx: int,
        block_size: int,
        block_table: list[int],
    ) -> Any:
        return function(block_table, context_len, seq_len, start_idx, block_size)

    def batch(
        query_lens: list[int],
        num_computed_tokens: list[int],
        block_rows: list[list[int]],
        block_size: int,
    ) -> Any:
        slots = [torch.empty(0, dtype=torch.int64)]
        for new, done, row in zip(
            query_lens, num_computed_tokens, block_rows, strict=True
        ):
            slots.append(function(row, done, done + new, 0, block_size))
        return torch.cat(slots)

    return {"compute_slot_mapping": one, "compute_slot_mapping_batch": batch}


PUZZLE = Puzzle(
    number=1,
    name="slot_mapping",
    title="the cache slot of every new token",
    page="concepts/slot_mapping",
    template=TEMPLATE,
    results={"slots": ("token",)},
    cases=cases,
    right=right,
    has_strides=False,
    hints=(
        Hint(
            "no_table",
            "This is the position itself. A position is a place in the sequence and a slot is"
            " a place in the cache. The block table leads from one to the other.",
            changed(block_table=lambda case: list(range(len(case["block_table"])))),
        ),
        Hint(
            "block_edge",
            "The first position of a block still belongs to the block before. Positions count"
            " from 0: with 4 slots per block, entry 0 holds positions 0 to 3, not 1 to 4.",
            by_entry(lambda place, size: (place - 1) // size),
        ),
        Hint(
            "next_block",
            "The last position of a block is in the next block already. With 4 slots per"
            " block, position 3 is the last one of entry 0, and position 4 is in entry 1.",
            by_entry(lambda place, size: (place + 1) // size),
        ),
        Hint(
            "no_offset",
            "All tokens of a block get the same slot, its first one. What is missing is the"
            " offset of the token in its block.",
            without_offset,
        ),
        Hint(
            "block_not_slot",
            "This is the id of the block. A block has block_size slots, so block 2 does not"
            " begin at slot 2.",
            block_ids,
        ),
        Hint(
            "unit",
            "A block id counts blocks and an offset counts slots. Bring both to the same unit"
            " before you add them.",
            added,
        ),
        Hint(
            "context",
            "The new tokens do not begin at position 0: the context comes before them. The"
            " position of new token 0 is context_len.",
            changed(
                context_len=lambda case: 0,
                seq_len=lambda case: case["seq_len"] - case["context_len"],
                start_idx=lambda case: case["start_idx"] - case["context_len"],
            ),
        ),
        Hint(
            "context",
            "The new tokens do not begin at position 0: the context comes before them. The"
            " position of new token 0 is context_len.",
            changed(
                context_len=lambda case: 0,
                seq_len=lambda case: case["seq_len"] - case["context_len"],
            ),
        ),
        Hint(
            "only_new",
            "The result has one slot per new token. Tokens of the context were stored in an"
            " earlier step and have no entry here.",
            changed(context_len=lambda case: 0),
        ),
        Hint(
            "padding_written",
            "A position before start_idx got a real slot, so its token would be written to"
            " the cache. Tokens that are not stored get -1.",
            changed(start_idx=lambda case: 0),
        ),
        Hint(
            "start_edge",
            "start_idx is the first position that IS stored. Compare with < and <= at exactly"
            " that position.",
            changed(start_idx=lambda case: case["start_idx"] + 1),
        ),
        Hint(
            "start_counts_positions",
            "start_idx is a position in the sequence, not a number of new tokens.",
            changed(start_idx=lambda case: case["start_idx"] + case["context_len"]),
        ),
    ),
    idea="Compute one position by hand: which entry of the block table, which block, which"
    " offset in that block? Then compare with the case above.",
    operations=operations,
    laws=(
        "tokens before the start get no slot and all others theirs",
        "every new token gets the slot of its block table row",
    ),
    law_hint="The small cases are right. Here the block ids are large: a slot id can need more"
    " than 32 bits. Check also that entries past the end of the sequence are never read.",
)
