"""Laws of scores of any magnitude: far below and far above zero, and far beyond a soft cap.

The queries have one element that is not 0, so each score is that of one element of a key.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ..generators.batches import BatchPlan
from ..generators.options import Call, paged_call
from ..harness.calling import expect_right, run_call
from ..harness.law import Setting, law


@st.composite
def score_levels(draw: st.DrawFn) -> tuple[tuple[float, ...], int, int | None]:
    """Return the score of each key, the number of new tokens, and a window."""
    pick = Random(draw(st.integers(0, 2**20)))
    base = pick.choice([-9e4, -6e4, -1e4, 0.0, 3e4, 6e4])
    count = pick.choice([1, 5, 16, 17, 40, 70])
    steps = [0.0, 0.0, -1.0, -100.0, -4096.0]
    levels = [base + pick.choice(steps) for _ in range(count)]
    window = pick.choice([None, 3, 17])
    if window is not None:  # masked keys would outweigh all visible ones
        levels = [
            level + (3e4 if position <= count - window - 2 else 0.0)
            for position, level in enumerate(levels)
        ]
    return tuple(levels), pick.choice([1, min(2, count)]), window


def scored_call(
    setting: Setting, query_len: int, levels: Sequence[float], **options: Any
) -> Call:
    """Return a call of one head whose scores are the levels, rounded to the elements' dtype.

    Args:
        setting: The plan is fitted to its declared support.
        query_len: Number of new tokens.
        levels: The score of each key.
        options: Options of the call.
    """
    plan = BatchPlan((query_len,), (len(levels),), kv_heads=1, group=1, scale=1.0)
    plan = setting.fit(replace(plan, seed=len(levels)))
    call = paged_call(plan, setting.device, **options)
    scale = plan.head_size**-0.5 if plan.scale is None else plan.scale
    largest = max(1.0, *map(abs, levels))
    # products of heads of 256 are 16 times the score, and float16 holds 65,504 at most
    small = min(1.0, 4000 / largest) if plan.dtype == torch.float16 else 1.0
    call.query.zero_()
    call.query[..., 0] = 16 / scale
    keys, size = call.arguments["key_cache"], plan.block_size
    for position, level in enumerate(levels):
        block_id, offset = call.rows[0][position // size], position % size
        keys[block_id, offset, 0, 0] = small * level / 16
    return call


@law("paged_attention", cases=score_levels())
def scores_of_any_magnitude_are_weighted_by_their_differences(
    setting: Setting, case: tuple[tuple[float, ...], int, int | None]
) -> None:
    """Scores far below any finite stand-in for minus infinity, and far above exp's range."""
    levels, query_len, window = case
    call = scored_call(setting, query_len, levels, sliding_window=window)
    # a score of this size may be rounded once, when it is converted to another base
    expect_right(setting, call, run_call(setting, call), is_joined=True)


CAPS = [(50.0, 3.0), (50.0, -3.0), (1000.0, 20.0), (1000.0, -20.0), (1e4, 300.0)]


@law("paged_attention", cases=CAPS)
def a_soft_cap_far_above_the_scores_does_not_round_them(
    setting: Setting, case: tuple[float, float]
) -> None:
    """There tanh is nearly linear, and a formula that subtracts from 1 loses the difference."""
    cap, base = case
    for count in (2, 5, 40):
        levels = [base + (position * 7 % 11) / 10 for position in range(count)]
        call = scored_call(setting, 1, levels, logits_soft_cap=cap)
        expect_right(setting, call, run_call(setting, call), is_joined=True)


FAR_CAPS = [
    (cap, far, lens) for cap in (0.5, 30.0) for far in (80, 3e3) for lens in (1, 3)
]


@law("paged_attention", cases=FAR_CAPS)
def scores_far_beyond_a_soft_cap_are_the_cap(
    setting: Setting, case: tuple[float, float, int]
) -> None:
    """Exponentials of 89 are infinite in float32; the scores are up to 3,000 caps."""
    cap, far, query_len = case
    factors = (0.0, 1.0, -1.0, 0.6, 1e-3 / far)
    levels = [cap * far * factors[position % 5] for position in range(40)]
    call = scored_call(setting, query_len, levels, logits_soft_cap=cap)
    expect_right(setting, call, run_call(setting, call), is_joined=True)
