"""Laws of slot mapping: the cache slot of every new token.

Slots are integers, so results are compared exactly. The expected slots are computed here position
by position, without either twin.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ..candidates.setting import Setting
from ..cases.batches import GARBAGE, table_of_rows
from ..cases.steps import Runs
from ..checks.canaries import expect_own_memory, kept, packed
from ..checks.expect import expect_rejection, expect_same
from .law import law


@dataclass(frozen=True)
class SlotStep:
    """The lengths and block ids of a step's requests.

    Args:
        new, computed: [reqs] number of new tokens, and of tokens in the cache.
        rows: [reqs] block ids of each request.
        block_size: Slots per block.
        padding: Number of padding slots after the last new token.
        stride: Elements from one entry of a tensor to the next.
    """

    new: tuple[int, ...]
    computed: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    block_size: int
    padding: int = 0
    stride: int = 1

    def slots(self) -> list[int]:
        """Return the slot of every new token, computed position by position."""
        return [
            row[position // self.block_size] * self.block_size
            + position % self.block_size
            for new, computed, row in zip(
                self.new, self.computed, self.rows, strict=True
            )
            for position in range(computed, computed + new)
        ]


@st.composite
def steps(draw: st.DrawFn) -> SlotStep:
    """Return a step with lengths on both sides of block edges and scattered blocks.

    The block ids are less than 4096, 2**16 or 2**31. With the largest ids a slot may need more
    than 32 bits.
    """
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 3, 7, 16, 16, 24])
    edges = [0, 1, size - 1, size, size + 1, 3 * size, 3 * size + 1]
    reqs = pick.choice([0, 1, 2, 3, 5])
    new = tuple(pick.choice([*edges, 1, 1, 2, 5, 300]) for _ in range(reqs))
    computed = tuple(pick.choice([*edges, pick.randint(0, 70)]) for _ in range(reqs))
    top = pick.choice([4096, 2**16, 2**31])
    ids = pick.sample(range(top - 4096, top), 4096)
    if pick.random() < 0.3:  # block 0 is a block like any other
        ids = [block_id for block_id in ids if block_id] + [0]
    rows: list[tuple[int, ...]] = []
    for own, before in zip(new, computed, strict=True):
        count = -(-(own + before) // size) + pick.choice([0, 0, 1])
        row = [ids.pop() for _ in range(count)]
        if rows and pick.random() < 0.3:  # a prefix of another request's blocks
            shared = min(len(row), len(rows[0])) // 2
            row[:shared] = rows[0][:shared]
        rows.append(tuple(row))
    return SlotStep(
        new,
        computed,
        tuple(rows),
        size,
        padding=pick.choice([0, 0, 1, 3, 70]),
        stride=pick.choice([1, 1, 2, 3]),
    )


LARGE_STEPS = [
    SlotStep(
        Runs((1, 298), (300, 1), (1, 1)),
        Runs((3, 299), (270, 1)),
        Runs(((70_000,), 298), (Runs((70_001, 60), (9, 16)), 1), (Runs((6, 68)), 1)),
        4,
        padding=300,
    ),
    SlotStep(
        (300, 1), (65_600, 300),
        (Runs((70_000, 4000), (5, 119)), Runs((9, 10), (70_001, 9))), 16,
    ),
    SlotStep((2, 1), (299, 600), ((70_000, 9), (7, 6, 3)), 300),
    SlotStep((2,), (65_599,), ((70_000, 9),), 65_600),
]  # fmt: skip
"""Requests, tokens, positions, block ids and sizes that do not fit 8 and 16 bits."""


@law(
    "compute_slot_mapping_batch",
    cases=steps(),
    edges=[
        *LARGE_STEPS,
        SlotStep((65_600, 1), (3, 4), (Runs((70_000, 4000), (5, 101)), (3,)), 16),
    ],
)
def every_new_token_gets_the_slot_of_its_block_table_row(
    setting: Setting, step: SlotStep
) -> None:
    """The input lists are not modified. Entries past the end of a row may hold garbage."""
    new, computed = list(step.new), list(step.computed)
    rows = [
        [*row, *GARBAGE] if req % 2 else [*row] for req, row in enumerate(step.rows)
    ]
    before = [list(new), list(computed), [list(row) for row in rows]]
    found = setting.candidate.compute_slot_mapping_batch(
        new, computed, rows, step.block_size
    )
    expect_same("slots", packed(found), torch.tensor(step.slots(), dtype=torch.int64))
    expect_same("what was given", [new, computed, rows], before)


def spread(numbers: Tensor, stride: int, device: torch.device) -> Tensor:
    """Return the same numbers with a stride, and garbage between entries of the last axis."""
    wide = torch.full((*numbers.shape, stride), 10**6, dtype=numbers.dtype)
    wide[..., 0] = numbers
    return wide.flatten(-2).to(device)[..., ::stride]


def tensors_of(step: SlotStep, device: torch.device) -> dict[str, Tensor]:
    """Return starts, counts and a block table, as views. Rows are followed by garbage."""
    width = max(map(len, step.rows), default=0) + 2
    table = table_of_rows(step.rows, width)
    starts = torch.tensor([0, *step.new], dtype=torch.int32).cumsum(0).int()
    computed = torch.tensor(step.computed, dtype=torch.int32)
    return {
        "query_start_loc": spread(starts, step.stride, device),
        "num_computed_tokens": spread(computed, step.stride, device),
        "block_table": spread(table, step.stride, device),
    }


@law("compute_slot_mapping_device", cases=steps(), edges=LARGE_STEPS)
def slots_on_the_device_are_those_of_the_host(setting: Setting, step: SlotStep) -> None:
    """Every row is followed by garbage, and the last token by padding."""
    given = tensors_of(step, setting.device)
    with kept(**given):
        found = setting.candidate.compute_slot_mapping_device(
            **given,
            block_size=step.block_size,
            num_tokens=sum(step.new) + step.padding,
        )
    right = [*step.slots(), *[PAD_SLOT_ID] * step.padding]
    expect_same("device of the slots", found.device.type, setting.device.type)
    expect_same("slots", packed(found), torch.tensor(right, dtype=torch.int64))
    expect_own_memory("slots", found, **given)


@law(
    "compute_slot_mapping_device",
    cases=[SlotStep((9, 9), (4, 7), ((1, 5), (9, 3)), 16)],
)
def a_smaller_step_after_a_larger_one_leaves_no_old_slot(
    setting: Setting, step: SlotStep
) -> None:
    """The tail is padding again. The slots of the larger step do not change."""
    device, small = setting.device, SlotStep((1, 0), (4, 7), step.rows, step.block_size)
    padded = sum(step.new) + 5
    call = setting.candidate.compute_slot_mapping_device
    answers = [
        call(**tensors_of(next_step, device), block_size=16, num_tokens=padded)
        for next_step in (step, small, step)
    ]
    for found, next_step in zip(answers, (step, small, step), strict=True):
        slots = next_step.slots()
        right = [*slots, *[PAD_SLOT_ID] * (padded - len(slots))]
        expect_same("slots", packed(found), torch.tensor(right, dtype=torch.int64))


@dataclass(frozen=True)
class OneSequence:
    """The lengths and block ids of one sequence.

    Args:
        new, computed: Number of new tokens, and of tokens in the cache.
        start_idx: First position that is stored.
        row: Block ids of the sequence.
        block_size: Slots per block.
        spare: Number of garbage entries past the end of the row.
    """

    new: int
    computed: int
    start_idx: int
    row: tuple[int, ...]
    block_size: int
    spare: int = 0


@st.composite
def sequences(draw: st.DrawFn) -> OneSequence:
    """Return a sequence. Its first stored position is before, among or after the new tokens."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 5, 16, 24])
    edges = [0, 1, size - 1, size, size + 1, 2 * size, 3 * size + 1]
    new, computed = pick.choice(edges), pick.choice(edges)
    end = new + computed
    starts = [0, computed, computed + 1, max(computed - 1, 0), end, end + 3]
    top = pick.choice([64, 2**16, 2**31])
    row = pick.sample(range(top - 64, top), -(-end // size))
    return OneSequence(
        new,
        computed,
        pick.choice([*starts, pick.randint(0, end)]),
        tuple(row),
        size,
        pick.choice([0, 1, 4]),
    )


LARGE_SEQUENCES = [
    OneSequence(300, 65_600, 65_700, Runs((70_000, 4000), (5, 119)), 16),
    OneSequence(700, 3, 290, Runs((70_000, 64), (5, 112)), 4),
    OneSequence(65_600, 1, 65_590, Runs((70_000, 4000), (5, 101)), 16),
    OneSequence(3, 65_599, 0, (70_000, 7), 65_600),
]
"""Lengths, positions, ids and sizes that do not fit 8 and 16 bits."""


@law("compute_slot_mapping", cases=sequences(), edges=LARGE_SEQUENCES)
def tokens_before_the_start_get_no_slot_and_all_others_theirs(
    setting: Setting, one: OneSequence
) -> None:
    row = [*one.row, *GARBAGE[: one.spare]]
    before = list(row)
    found = setting.candidate.compute_slot_mapping(
        is_profile_run=False,
        seq_len=one.computed + one.new,
        context_len=one.computed,
        start_idx=one.start_idx,
        block_size=one.block_size,
        block_table=row,
    )
    right = []
    for position in range(one.computed, one.computed + one.new):
        block_id, offset = row[position // one.block_size], position % one.block_size
        slot = block_id * one.block_size + offset
        right.append(PAD_SLOT_ID if position < one.start_idx else slot)
    expect_same("slots", packed(found), torch.tensor(right, dtype=torch.int64))
    expect_same("block_table, which is only read", row, before)


@law("compute_slot_mapping", cases=sequences(), edges=LARGE_SEQUENCES)
def a_dry_run_gives_no_token_a_slot(setting: Setting, one: OneSequence) -> None:
    """The cache does not exist yet, so all tokens are new, with or without a block table."""
    seq_len = one.computed + one.new
    for row in (None, list(one.row)):
        found = setting.candidate.compute_slot_mapping(
            True, seq_len, one.computed, one.start_idx, one.block_size, row
        )
        right = torch.tensor([PAD_SLOT_ID] * seq_len, dtype=torch.int64)
        expect_same("slots of a dry run", packed(found), right)


@dataclass(frozen=True)
class Windowed:
    """Number of new tokens, of tokens in the cache and of visible keys."""

    is_prompt: bool
    new: int
    computed: int
    window: int | None


@st.composite
def windows(draw: st.DrawFn) -> Windowed:
    """Return a sequence that is shorter than its window, equally long, or longer."""
    pick = Random(draw(st.integers(0, 2**20)))
    window = pick.choice([0, 1, 2, 5, 16, 17])
    seq_len = pick.choice([0, 1, window - 1, window, window + 1, 2 * window, 40])
    seq_len = max(seq_len, 0)
    new = min(pick.choice([0, 1, window, seq_len, seq_len, seq_len // 2]), seq_len)
    is_none = pick.random() < 0.2
    return Windowed(
        pick.random() < 0.7, new, seq_len - new, None if is_none else window
    )


@law(
    "compute_slot_mapping_start_idx",
    cases=windows(),
    edges=[
        Windowed(True, 300, 270, 256),
        Windowed(True, 65_600, 70_000, 65_536),
        Windowed(True, 1, 131_200, 300),
    ],
)
def a_prompt_stores_just_the_keys_that_its_window_leaves(
    setting: Setting, case: Windowed
) -> None:
    """A decode stores all tokens. So does a layer without a window."""
    found = setting.candidate.compute_slot_mapping_start_idx(
        is_prompt=case.is_prompt,
        query_len=case.new,
        context_len=case.computed,
        sliding_window=case.window,
    )
    seq_len, right = case.computed + case.new, 0
    if case.is_prompt and case.window is not None:
        while seq_len - right > case.window:
            right += 1
    expect_same("first stored position", int(found), right)


def on_device(**changes: Any) -> tuple[str, dict[str, Any]]:
    """Return a call that is valid except for `changes`, with Python values for tensors."""
    right = {"starts": [0, 3, 5], "computed": [2, 4], "table": [[1, 2], [3, 0]]}
    return "compute_slot_mapping_device", (
        {"block_size": 4, "num_tokens": 6} | right | changes
    )


def of_batch(**changes: Any) -> tuple[str, dict[str, Any]]:
    """Return a call that is valid except for `changes`."""
    right = {"query_lens": [3, 2], "num_computed_tokens": [2, 4], "block_size": 4}
    return "compute_slot_mapping_batch", (
        right | {"block_rows": [[1, 2], [3, 0]]} | changes
    )


def of_one(**changes: Any) -> tuple[str, dict[str, Any]]:
    """Return a call that is valid except for `changes`."""
    right = {"seq_len": 5, "context_len": 2, "start_idx": 0, "block_size": 4}
    return "compute_slot_mapping", (
        right | {"is_profile_run": False, "block_table": [1, 2]} | changes
    )


def of_window(**changes: Any) -> tuple[str, dict[str, Any]]:
    """Return a call that is valid except for `changes`."""
    right = {"is_prompt": True, "query_len": 5, "context_len": 2, "sliding_window": 3}
    return "compute_slot_mapping_start_idx", right | changes


REJECTED = {
    "a row of one block for five tokens": of_one(block_table=[3], context_len=0),
    "a last token past the row": of_one(seq_len=9),
    "a last token past the row that is not stored": of_one(seq_len=9, start_idx=9),
    "no row": of_one(block_table=None),
    "more tokens cached than there are": of_one(context_len=6),
    "a negative context": of_one(context_len=-1),
    "no slot in a block": of_one(block_size=0),
    "one token too many for a row": of_batch(query_lens=[7, 2]),
    "one cached token too many": of_batch(num_computed_tokens=[2, 7]),
    "a request without new tokens past its row": of_batch(
        query_lens=[3, 0], num_computed_tokens=[2, 9]
    ),
    "a negative count": of_batch(query_lens=[3, -1]),
    "a negative context in a batch": of_batch(num_computed_tokens=[-1, 4]),
    "one context too few": of_batch(num_computed_tokens=[2]),
    "one row too few": of_batch(block_rows=[[1, 2]]),
    "one row too many": of_batch(block_rows=[[1, 2], [3, 0], [4]]),
    "blocks without slots": of_batch(block_size=0),
    "a row that ends too early, on the device": on_device(computed=[6, 4]),
    "starts that do not begin at 0": on_device(starts=[1, 3, 5]),
    "starts that fall": on_device(starts=[0, 3, 2]),
    "fewer slots than tokens": on_device(num_tokens=4),
    "one start too few": on_device(starts=[0, 5]),
    "one count too few": on_device(computed=[2]),
    "a negative count on the device": on_device(computed=[2, -1]),
    "blocks of no slot on the device": on_device(block_size=0),
    "a table of 64 bits": on_device(dtype=torch.int64),
    "a negative number of new tokens": of_window(query_len=-1),
    "a negative number of cached tokens": of_window(context_len=-1),
    "a negative window": of_window(sliding_window=-1),
}


@law(
    "compute_slot_mapping_start_idx",
    "compute_slot_mapping",
    "compute_slot_mapping_batch",
    "compute_slot_mapping_device",
    cases=list(REJECTED),
    claim="rejects contents",
)
def impossible_lengths_are_rejected(setting: Setting, case: str) -> None:
    operation, arguments = REJECTED[case]
    if operation == "compute_slot_mapping_device":
        dtype = arguments.get("dtype", torch.int32)
        arguments = {
            name: torch.tensor(arguments[key], dtype=int_type, device=setting.device)
            for name, key, int_type in (
                ("query_start_loc", "starts", torch.int32),
                ("num_computed_tokens", "computed", torch.int32),
                ("block_table", "table", dtype),
            )
        } | {name: arguments[name] for name in ("block_size", "num_tokens")}
    expect_rejection(case, lambda: getattr(setting.candidate, operation)(**arguments))
