"""Which laws hold for block tables and slot mappings?

All of it is integers, so every answer is exactly right or wrong. What is right is written out here
position by position, without either twin.
"""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st

from ..kinds import PAD_SLOT_ID
from .batches import GARBAGE
from .expect import expect_refusal, expect_same
from .law import Setting, law


@dataclass(frozen=True)
class Step:
    """A step's requests in numbers.

    Args:
        new, computed: new tokens, and tokens in the cache, of each request.
        rows: block ids of each request.
        block_size: slots in a block.
    """

    new: tuple[int, ...]
    computed: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    block_size: int

    def slots(self) -> list[int]:
        """Return the slot of every new token, position by position."""
        return [
            row[place // self.block_size] * self.block_size + place % self.block_size
            for new, computed, row in zip(
                self.new, self.computed, self.rows, strict=True
            )
            for place in range(computed, computed + new)
        ]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Return a step with lengths on both sides of block edges and scattered blocks."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 3, 16, 16, 24])
    edges = [0, 1, size - 1, size, size + 1, 3 * size, 3 * size + 1]
    reqs = pick.choice([0, 1, 2, 3, 5])
    new = tuple(pick.choice([*edges, 1, 1, 300]) for _ in range(reqs))
    computed = tuple(pick.choice([*edges, pick.randint(0, 70)]) for _ in range(reqs))
    ids = pick.sample(range(2**16), 4096)
    rows = []
    for own, before in zip(new, computed, strict=True):
        count = -(-(own + before) // size) + pick.choice([0, 0, 1])
        rows.append(tuple(ids.pop() for _ in range(count)))
    return Step(new, computed, tuple(rows), size)


@law("compute_slot_mapping_batch", cases=steps())
def every_new_token_gets_the_slot_that_its_row_says(
    setting: Setting, step: Step
) -> None:
    found = setting.candidate.compute_slot_mapping_batch(
        list(step.new),
        list(step.computed),
        [list(row) for row in step.rows],
        step.block_size,
    )
    expect_same("slots", found.cpu(), torch.tensor(step.slots(), dtype=torch.int64))


@law("compute_slot_mapping_device", cases=steps())
def slots_on_the_device_are_those_of_the_host(setting: Setting, step: Step) -> None:
    """Garbage stands behind every row, and padding behind the last token."""
    device = setting.device
    width = max(map(len, step.rows), default=0) + 2
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(step.new), width)
    table = table[:, :width].contiguous()
    for req, row in enumerate(step.rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    starts = torch.tensor([0, *step.new], dtype=torch.int32).cumsum(0).int()
    padded = sum(step.new) + 3
    found = setting.candidate.compute_slot_mapping_device(
        starts.to(device),
        torch.tensor(step.computed, dtype=torch.int32).to(device),
        table.to(device),
        step.block_size,
        padded,
    )
    right = [*step.slots(), *[PAD_SLOT_ID] * 3]
    expect_same("slots", found.cpu(), torch.tensor(right, dtype=torch.int64))


@law("compute_slot_mapping_batch", cases=[Step((5,), (0,), ((3,),), 4)])
def a_position_past_the_end_of_its_row_is_refused(setting: Setting, step: Step) -> None:
    expect_refusal(
        "a row of one block for five tokens",
        lambda: setting.candidate.compute_slot_mapping_batch(
            list(step.new), list(step.computed), [list(row) for row in step.rows], 4
        ),
    )
