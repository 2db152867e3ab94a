"""Laws of reference sliding windows: the prompt stays visible, and a window limits the rest."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ..candidates.setting import Setting
from ..cases.steps import (
    CROWD,
    LONG,
    MANY,
    Requests,
    counts,
    draw_requests,
    several,
)
from ..checks.expect import expect_rejection, expect_same
from .law import law

UNTOUCHED = -99


@dataclass(frozen=True)
class VisiblePrompts:
    """A step of sequences whose prompts stay visible.

    Args:
        step: The requests.
        lens: [reqs] tokens of each prompt, which may be longer than the sequence is by now.
        spare: Number of rows after the last new token.
    """

    step: Requests
    lens: tuple[int, ...]
    spare: int = 0


@st.composite
def prompts(draw: st.DrawFn) -> VisiblePrompts:
    """Return prompts that end before, among and after the new tokens, and some without tokens."""
    pick = Random(draw(st.integers(0, 2**20)))
    step = draw_requests(pick)
    lens = [
        pick.choice([0, 1, computed, computed + 1, computed + new, computed + new + 5])
        for new, computed in zip(step.new, step.computed, strict=True)
    ]
    return VisiblePrompts(step, tuple(lens), pick.choice([0, 0, 3]))


LARGE_PROMPTS = [
    VisiblePrompts(MANY, tuple(7 * req % 300 for req in range(len(MANY.new))), 300),
    VisiblePrompts(LONG, tuple(70_000 + req for req in range(len(LONG.new)))),
    VisiblePrompts(CROWD, tuple(req % 5 for req in range(len(CROWD.new))), 3),
]
"""Requests, positions and prompts that do not fit 8 and 16 bits."""


@law(
    "fill_rswa_query_ranges",
    cases=several(prompts()),
    edges=[[prompts] for prompts in LARGE_PROMPTS],
)
def every_new_token_gets_the_prompt_up_to_itself(
    setting: Setting, cases: list[VisiblePrompts]
) -> None:
    """Rows after the new tokens have no range. The lengths are on the device, and are only read."""
    for prompts in cases:
        step, total = prompts.step, sum(prompts.step.new)
        given = (counts(prompts.lens), counts(step.starts), counts(step.seq_lens))
        tensors = [tensor.to(setting.device) for tensor in given]
        out = torch.full((total + prompts.spare, 2), UNTOUCHED, dtype=torch.int32)
        out = out.to(setting.device)
        result = setting.candidate.fill_rswa_query_ranges(out, *tensors)
        expect_same("what is returned", result, None)
        for name, before, after in zip(
            ("prompts", "starts", "lengths"), given, tensors, strict=True
        ):
            expect_same(f"the {name} afterwards", after, before.to(setting.device))
        right: list[tuple[int, int]] = []
        for req, position in zip(step.owners(), step.positions(), strict=True):
            visible = range(min(position + 1, prompts.lens[req]))
            right.append((visible[0], visible[-1]) if visible else (-1, -1))
        right += [(-1, -1)] * prompts.spare
        flat = counts([number for span in right for number in span])
        expect_same(
            "ranges of the new tokens", out, flat.view(-1, 2).to(setting.device)
        )


@dataclass(frozen=True)
class BadPrompts:
    """An invalid call.

    Args:
        arguments: Rows of the buffer, prompts, starts and lengths.
        what: The reason why it is invalid.
    """

    arguments: tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    what: str


SHAPES = [
    BadPrompts((4, (2, 2), (0, 4), (4,)), "a prompt of a request too many"),
    BadPrompts((4, (2,), (0, 2, 4), (4,)), "a start too many"),
]
CONTENTS = [
    BadPrompts((3, (2,), (0, 4), (4,)), "too few rows"),
    BadPrompts((4, (-1,), (0, 4), (4,)), "a negative prompt"),
    BadPrompts((4, (2,), (0, 4), (3,)), "more new tokens than tokens"),
    BadPrompts((4, (2, 2), (0, 3, 2), (4, 4)), "starts that decrease"),
]


def reject(setting: Setting, invalid: BadPrompts) -> None:
    """Raise unless the call is rejected and leaves the rows as they were."""
    rows, *given = invalid.arguments
    out = torch.full((rows, 2), UNTOUCHED, dtype=torch.int32, device=setting.device)
    tensors: list[Any] = [counts(numbers).to(setting.device) for numbers in given]
    expect_rejection(
        invalid.what,
        lambda: setting.candidate.fill_rswa_query_ranges(out, *tensors),
        {"the rows": out},
    )


@law("fill_rswa_query_ranges", cases=SHAPES, claim="rejects shapes")
def prompts_of_another_step_are_rejected(setting: Setting, invalid: BadPrompts) -> None:
    reject(setting, invalid)


@law("fill_rswa_query_ranges", cases=CONTENTS, claim="rejects contents")
def impossible_prompts_are_rejected(setting: Setting, invalid: BadPrompts) -> None:
    reject(setting, invalid)
