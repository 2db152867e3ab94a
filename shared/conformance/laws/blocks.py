"""Laws of block tables and their rows.

All values are integers. A table that is used as long as an engine runs is compared after every move
with plain Python lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..candidates.setting import Setting
from ..cases.steps import Runs
from ..cases.table_rows import Life, TableRows, lives, make_move, row_sets
from ..checks.canaries import (
    copy_of,
    expect_memory,
    expect_own_memory,
    expect_rejection_without_writes,
    kept,
    packed,
)
from ..checks.expect import expect_rejection, expect_same
from .law import law


@st.composite
def token_counts(draw: st.DrawFn) -> tuple[int, int]:
    """Return a number of tokens and a block size: small, and past 32 or 53 bits."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 3, 16, 24, 544])
    blocks = pick.choice([0, 1, 2, 5, 2**27, 2**31, 2**55])
    return max(0, blocks * size + pick.choice([-1, 0, 1])), size


@law("blocks_needed", cases=token_counts())
def blocks_needed_are_the_fewest_that_hold_the_tokens(
    setting: Setting, case: tuple[int, int]
) -> None:
    num_tokens, size = case
    found = setting.candidate.blocks_needed(num_tokens=num_tokens, block_size=size)
    right = num_tokens // size
    while right * size < num_tokens:
        right += 1
    expect_same("blocks", int(found), right)


LARGE_SETS = [
    TableRows(
        Runs(((7, 70_000), 299), ((3,), 1)),
        Runs(((), 298), ((70_001, 9), 1), ((300,), 1)),
        4,
    ),
    TableRows((Runs((70_000, 290), (5, 1)), (9,)), ((8, 300), Runs((6, 280))), 300),
]
"""Rows, entries and block ids that do not fit 8 and 16 bits."""


@law("make_block_table", cases=row_sets(), edges=LARGE_SETS)
def a_table_holds_the_rows_and_then_zeros(setting: Setting, case: TableRows) -> None:
    """Its width is `max_blocks`, or the longest row if None. The lists are not modified."""
    rows = [list(row) for row in case.rows]
    longest = max(map(len, rows), default=0)
    for width in (None, case.width, case.width + 3):
        found = setting.candidate.make_block_table(
            rows, max_blocks=width, device=setting.device
        )
        columns = longest if width is None else width
        right = torch.zeros(len(rows), columns, dtype=torch.int32)
        for req, row in enumerate(case.rows):
            for entry, block_id in enumerate(row):
                right[req, entry] = block_id
        expect_same("block table", packed(found), right)
        expect_same("device of the table", found.device.type, setting.device.type)
    expect_same("rows, which are only read", rows, [list(row) for row in case.rows])


@law("append_blocks", cases=row_sets(), edges=LARGE_SETS)
def new_blocks_are_appended_to_their_row_and_nothing_else_changes(
    setting: Setting, case: TableRows
) -> None:
    """The table is a view of a wider one. The given counts are not modified."""
    table = case.table(setting.device)
    held = torch.tensor([len(row) for row in case.rows], dtype=torch.int32)
    right, counts = copy_of(table), held.tolist()
    for req, blocks in enumerate(case.new):
        for block_id in blocks:
            right[req, counts[req]] = block_id
            counts[req] += 1
    new = [list(blocks) for blocks in case.new]
    with kept(num_blocks=held):
        found = setting.candidate.append_blocks(table, held, new)
    expect_memory("block table", table, right)
    expect_same("blocks that each row holds", found, torch.tensor(counts).int())
    expect_own_memory("counts", found, num_blocks=held)
    expect_same("new_blocks, which are only read", new, [list(b) for b in case.new])


TABLE = TableRows(((7, 2), (5,)), ((), ()), 3)
REJECTED_ROWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a negative number of tokens": lambda c, _: c.blocks_needed(-1, 4),
    "a block without slots": lambda c, _: c.blocks_needed(3, 0),
    "a row longer than the table is wide": lambda c, _: c.make_block_table([[1, 2]], 1),
    "a negative block id": lambda c, _: c.make_block_table([[3], [1, -1]]),
    "a row that outgrows the table": lambda c, t: append(
        c, t, [2, 1], [[9], [1, 2, 3]]
    ),
    "a full row that gets one more": lambda c, t: append(c, t, [2, 3], [[9], [4]]),
    "a negative id to append": lambda c, t: append(c, t, [2, 1], [[9], [-1]]),
    "a row that holds less than nothing": lambda c, t: append(
        c, t, [2, -1], [[9], [4]]
    ),
    "one list too few": lambda c, t: append(c, t, [2, 1], [[9]]),
    "one count too few": lambda c, t: append(c, t, [2], [[9], [4]]),
}


def append(candidate: Any, table: Tensor, held: list[int], new: list[list[int]]) -> Any:
    """Call append_blocks."""
    return candidate.append_blocks(table, torch.tensor(held, dtype=torch.int32), new)


@law(
    "blocks_needed",
    "make_block_table",
    "append_blocks",
    cases=list(REJECTED_ROWS),
    claim="rejects contents",
)
def blocks_that_no_table_can_hold_are_rejected(setting: Setting, case: str) -> None:
    """All arguments are validated before anything is written, to the other rows as well."""
    table = TABLE.table(setting.device)
    expect_rejection_without_writes(
        case, lambda: REJECTED_ROWS[case](setting.candidate, table), block_table=table
    )


def expect_rows(table: Any, life: Life, rows: list[list[int]]) -> None:
    """Raise Disagreement if the rows differ, or an entry past the end of a row is not 0."""
    entries = [life.entries(row) for row in rows]
    counts = [int(count) for count in table.num_blocks_per_row]
    expect_same("num_blocks_per_row", counts, [len(row) for row in entries])
    width = len(life.entries([0])) * life.width
    right = torch.tensor(
        [row + [0] * (width - len(row)) for row in entries], dtype=torch.int32
    )
    for num_reqs in {0, 1, life.reqs - 1, life.reqs}:
        found = table.get_device_tensor(num_reqs)
        expect_same(f"the first {num_reqs} rows", found.cpu(), right[:num_reqs])


MOVES = (
    ("add_row", (7, 70_000), 299),
    ("append_row", (300,), 299),
    ("add_row", (9,), 256),
    ("move_row", 299, 258),
    ("swap_row", 256, 299),
)
LARGE_LIVES = [
    Life(4, 2, 300, 3, 1, 1, MOVES),
    Life(
        4, None, 2, 300, 1, 1,
        (("add_row", Runs((70_000, 280), (5, 1)), 1), ("append_row", Runs((6, 9)), 1)),
    ),
    Life(600, 300, 2, 3, 2, 300, (("add_row", (7, 70_000), 1),)),
    # a rank's positions are dealt out first, and its blocks divided then
    Life(64, 16, 2, 2, 2, 4, (("add_row", (7, 3), 0), ("add_row", (5,), 1))),
    Life(64, 16, 2, 2, 3, 16, (("add_row", (7, 3), 0), ("add_row", (5,), 1))),
    Life(32_800, None, 2, 3, 1, 1, (("add_row", (70_000, 5, 9), 1),)),
]  # fmt: skip
"""Rows, entries, ids, positions and sizes that do not fit 8 and 16 bits."""


@law("BlockTable", cases=lives(), edges=LARGE_LIVES)
def rows_are_the_result_of_all_operations_on_them(setting: Setting, life: Life) -> None:
    """After each move, every row is compared, and the zeros past its end."""
    table = life.table(setting.candidate, setting.device, rank=0)
    expect_same(
        "block_size", table.block_size, life.kernel_block_size or life.block_size
    )
    rows: list[list[int]] = [[] for _ in range(life.reqs)]
    expect_rows(table, life, rows)
    for move in life.moves:
        name, *given = move
        given = [
            list(argument) if isinstance(argument, tuple) else argument
            for argument in given
        ]
        getattr(table, name)(*given)
        make_move(rows, move)
        expect_rows(table, life, rows)


@law("BlockTable", cases=lives(), edges=LARGE_LIVES)
def the_slots_of_a_rank_are_filled_in_the_order_of_positions(
    setting: Setting, life: Life
) -> None:
    """Tokens come in any order, from any row. Positions of other ranks have no slot."""
    rows: list[list[int]] = [[] for _ in range(life.reqs)]
    for move in life.moves:
        make_move(rows, move)
    for rank in range(life.ranks):
        table = life.table(setting.candidate, setting.device, rank)
        for name, *given in life.moves:
            getattr(table, name)(*given)
        slots = [life.slots(row, rank) for row in rows]
        tokens = [(req, p) for req, own in enumerate(slots) for p in range(len(own))]
        Random(len(tokens)).shuffle(tokens)
        for some in (tokens, tokens[:1], []):
            reqs, positions = (
                [req for req, _ in some],
                [position for _, position in some],
            )
            found = table.compute_slot_mapping(req_indices=reqs, positions=positions)
            right = [slots[req][position] for req, position in some]
            expect_same(
                f"slots of rank {rank}", found, torch.tensor(right, dtype=torch.int64)
            )
            expect_same("req_indices, which are only read", reqs, [r for r, _ in some])


@law("BlockTable", cases=[Life(4, 2, 3, 3, 1, 1, (("add_row", (7, 2), 0),))])
def a_tensor_of_the_rows_does_not_change_later(setting: Setting, life: Life) -> None:
    """A step in flight may still read it. Writing to it changes no row."""
    table = life.table(setting.candidate, setting.device, rank=0)
    table.add_row([7, 2], 0)
    first = table.get_device_tensor(3)
    before = first.cpu().clone()
    table.append_row([5], 0)
    table.add_row([9], 1)
    expect_same("the rows of the step before", first.cpu(), before)
    second = table.get_device_tensor(3)
    second.fill_(77)
    expect_rows(table, life, [[7, 2, 5], [9], []])
    table.clear()
    expect_rows(table, life, [[], [], []])
    expect_same("the rows of the step before", first.cpu(), before)


REJECTED_MOVES: dict[str, Callable[[Any], Any]] = {
    "a block past the end of a row": lambda t: t.append_row([1, 2], 0),
    "a row that is too long": lambda t: t.add_row([1, 2, 3, 4], 0),
    "a row past the last": lambda t: t.append_row([1], 4),
    "a new row past the last": lambda t: t.add_row([1], 4),
    "a negative row": lambda t: t.append_row([1], -1),
    "a negative new row": lambda t: t.add_row([1], -1),
    "a negative block id": lambda t: t.append_row([-1], 1),
    "an id of more than 31 bits": lambda t: t.add_row([2**31], 1),
    "a negative block id after a valid one": lambda t: t.add_row([4, -1], 0),
    "a move from a row that is not there": lambda t: t.move_row(4, 0),
    "a move to a row that is not there": lambda t: t.move_row(0, 4),
    "a move from a negative row": lambda t: t.move_row(-1, 0),
    "a move to a negative row": lambda t: t.move_row(0, -1),
    "a swap with a row that is not there": lambda t: t.swap_row(0, 4),
    "a swap with a negative row": lambda t: t.swap_row(-1, 0),
    "a swap of a negative row": lambda t: t.swap_row(0, -1),
    "more rows than there are": lambda t: t.get_device_tensor(5),
    "less than no rows": lambda t: t.get_device_tensor(-1),
    "the first position past a row's end": lambda t: t.compute_slot_mapping([0], [8]),
    "a position of an empty row": lambda t: t.compute_slot_mapping([0, 2], [0, 0]),
    "a negative position": lambda t: t.compute_slot_mapping([0, 0], [1, -1]),
    "a token of no row": lambda t: t.compute_slot_mapping([4], [0]),
    "a token of a negative row": lambda t: t.compute_slot_mapping([-1], [0]),
    "a row without a position": lambda t: t.compute_slot_mapping([0, 1], [0]),
}


IN_KERNEL_BLOCKS = "an id of more than 31 bits in blocks of the kernel"


@law("BlockTable", cases=[*REJECTED_MOVES, IN_KERNEL_BLOCKS], claim="rejects shapes")
def a_rejected_operation_changes_no_row(setting: Setting, case: str) -> None:
    """This holds with one and with two kernel blocks per manager block."""
    for kernel_block_size in (None, 2):
        life = Life(4, kernel_block_size, 4, 3, 1, 1, ())
        table = life.table(setting.candidate, setting.device, rank=0)
        table.add_row([7, 2], 0)
        table.add_row([5], 1)
        table.add_row([8], 3)
        if case != IN_KERNEL_BLOCKS:
            expect_rejection(case, partial(REJECTED_MOVES[case], table))
        elif kernel_block_size is not None:
            expect_rejection(case, partial(table.add_row, [2**30], 1))
        expect_rows(table, life, [[7, 2], [5], [], [8]])


REJECTED_TABLES: dict[str, tuple[Sequence[int], dict[str, int]]] = {
    "blocks without slots": ((0, 2, 2), {}),
    "less than no rows": ((4, -1, 2), {}),
    "less than no blocks in a row": ((4, 2, -1), {}),
    "a kernel's block that does not divide": ((4, 2, 2), {"kernel_block_size": 3}),
    "a kernel's block that is larger": ((4, 2, 2), {"kernel_block_size": 8}),
    "a kernel's block without slots": ((4, 2, 2), {"kernel_block_size": 0}),
    "no ranks": ((4, 2, 2), {"dcp_world_size": 0}),
    "a rank past the last": ((4, 2, 2), {"dcp_world_size": 2, "dcp_rank": 2}),
    "a negative rank": ((4, 2, 2), {"dcp_world_size": 2, "dcp_rank": -1}),
    "turns that do not divide a block": (
        (4, 2, 2),
        {"dcp_world_size": 2, "dcp_kv_cache_interleave_size": 3},
    ),
    "turns that divide the manager's block alone": (
        (4, 2, 2),
        {"kernel_block_size": 2, "dcp_kv_cache_interleave_size": 4},
    ),
}


@law("BlockTable", cases=list(REJECTED_TABLES), claim="rejects shapes")
def sizes_that_do_not_divide_are_rejected(setting: Setting, case: str) -> None:
    sizes, options = REJECTED_TABLES[case]
    expect_rejection(case, lambda: setting.candidate.BlockTable(*sizes, **options))


@dataclass(frozen=True)
class States:
    """Rows whose blocks hold Mamba states.

    Args:
        seq_lens: tokens of each request.
        block_size: tokens between two states.
        drafts: blocks per request for drafted tokens.
        spare: columns past the end of the longest row.
        stride: elements from one entry to the next.
    """

    seq_lens: tuple[int, ...]
    block_size: int
    drafts: int
    spare: int
    stride: int

    def rows(self) -> TableRows:
        """Return rows of distinct ids, with the required lengths."""
        needed = [
            max(1, -(-seq_len // self.block_size)) + self.drafts
            for seq_len in self.seq_lens
        ]
        pick = Random(len(needed))
        rows = tuple(tuple(pick.sample(range(2**30), count)) for count in needed)
        none: tuple[int, ...] = ()
        width = max(needed, default=0) + self.spare
        return TableRows(rows, (none,) * len(rows), width, self.stride)


@st.composite
def states(draw: st.DrawFn) -> States:
    """Return sequences that end on both sides of a block's edge."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 4, 16, 24])
    edges = [0, 1, size - 1, size, size + 1, 2 * size, 5 * size + 1]
    return States(
        tuple(pick.choice(edges) for _ in range(pick.choice([0, 1, 3, 5]))),
        size,
        pick.choice([0, 0, 1, 3]),
        pick.choice([0, 1, 4]),
        pick.choice([1, 2]),
    )


LARGE_STATES = [
    States(Runs((5, 298), (300, 2)), 2, 1, 0, 1),
    States((70_000, 3), 16, 2, 1, 2),
    States((70_000, 65_600, 1), 65_600, 300, 0, 1),
]
"""Requests, lengths, blocks and drafts that do not fit 8 and 16 bits."""


@law("mamba_get_block_table_tensor", cases=states(), edges=LARGE_STATES)
def a_state_is_read_from_the_block_of_the_last_token(
    setting: Setting, case: States
) -> None:
    """The blocks of the drafts follow it. In the other modes the table is returned unchanged."""
    rows = case.rows()
    table = rows.table(setting.device)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32).to(setting.device)
    right = torch.zeros(len(rows.rows), 1 + case.drafts, dtype=torch.int32)
    for req, (seq_len, row) in enumerate(zip(case.seq_lens, rows.rows, strict=True)):
        last = 0
        while (last + 1) * case.block_size < seq_len:
            last += 1
        for draft in range(1 + case.drafts):
            right[req, draft] = row[last + draft]
    call = setting.candidate.mamba_get_block_table_tensor
    with kept(block_table=table, seq_lens=seq_lens):
        found = call(table, seq_lens, case.block_size, case.drafts, "align")
        expect_same("blocks of the states", packed(found), right)
        if not case.drafts:
            found = call(table, seq_lens, case.block_size, mamba_cache_mode="align")
            expect_same("blocks of the states, no drafts", packed(found), right)
        expect_same("device of the blocks", found.device.type, setting.device.type)
        for mode in ({}, {"mamba_cache_mode": "none"}, {"mamba_cache_mode": "all"}):
            whole = call(table, seq_lens, case.block_size, case.drafts, **mode)
            expect_same("table", packed(whole), packed(table))


REJECTED_STATES: dict[str, tuple[list[int], int, int, str]] = {
    "another mode": ([5, 4], 4, 0, "some"),
    "blocks without tokens": ([5, 4], 0, 0, "align"),
    "less than no drafts": ([5, 4], 4, -1, "align"),
    "one length too few": ([5], 4, 0, "align"),
    "a sequence longer than its row": ([5, 13], 4, 0, "align"),
    "a draft past the end of the row": ([9, 4], 4, 1, "align"),
}


@law(
    "mamba_get_block_table_tensor",
    cases=list(REJECTED_STATES),
    claim="rejects contents",
)
def states_that_no_row_holds_are_rejected(setting: Setting, case: str) -> None:
    seq_lens, block_size, drafts, mode = REJECTED_STATES[case]
    table = TABLE.table(setting.device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=setting.device)
    call = setting.candidate.mamba_get_block_table_tensor
    expect_rejection_without_writes(
        case, lambda: call(table, lens, block_size, drafts, mode), block_table=table
    )
