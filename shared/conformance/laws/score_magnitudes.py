"""Laws of scores of any magnitude: far below and far above zero, and far beyond a soft cap.

The queries have one element that is not 0, so each score is that of one element of a key.

Weights sum to 1 whatever the scores are. So the first element of every value is 1: without a sink
it is 1 in the output too. And where one key outweighs all others, the output is its value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ..candidates.calls.calling import Result, expect_right, run_call
from ..candidates.setting import Setting
from ..cases.batches import BatchPlan
from ..cases.latent_batches import LatentBatch, LatentPlan, build_latents
from ..cases.options import Call, paged_call, ragged_call, slopes
from .cascade import run_cascade
from .dcp_attention import Dealt, run_all_ranks
from .latents import WAYS, expect_latents, run_latents
from .law import law
from .parallel_step import Shared, run_all
from .prefill_parallel import Prompts, joined_rows


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


def factors_of(largest: float, scale: float) -> tuple[float, float]:
    """Return the element of the queries, and that of a key whose score is 1.

    Both elements are of about the same size at the largest score: float16 ends at 65,504.
    """
    query = 2.0 ** math.floor(math.log2(max(1.0, largest) / scale) / 2)
    return query, 1 / scale / query


def scored_call(
    setting: Setting, plan: BatchPlan, levels: Sequence[float], **options: Any
) -> Call:
    """Return a call whose scores are the levels, rounded to the elements' dtype.

    Args:
        setting: The plan is fitted to its declared support.
        plan: The batch. All requests have the same keys, from the last one backwards.
        levels: The score of each key.
        options: Options of the call.
    """
    plan = setting.fit(replace(plan, scale=1.0, seed=len(levels)))
    call = paged_call(plan, setting.device, **options)
    scale = plan.head_size**-0.5 if plan.scale is None else plan.scale
    query, key = factors_of(max(map(abs, levels)), scale)
    call.query[: sum(plan.query_lens)] = 0
    call.query[: sum(plan.query_lens), :, 0] = query
    keys, values = call.arguments["key_cache"], call.arguments["value_cache"]
    size = plan.block_size
    for row, key_len in zip(call.rows, plan.kv_lens, strict=True):
        for position, level in enumerate(levels[len(levels) - key_len :]):
            at = row[position // size], position % size
            keys[at][:, 0] = level * key
            values[at][:, 0] = 1
    return call


@law("paged_attention", cases=score_levels())
def scores_of_any_magnitude_are_weighted_by_their_differences(
    setting: Setting, case: tuple[tuple[float, ...], int, int | None]
) -> None:
    """Scores far below any finite stand-in for minus infinity, and far above exp's range."""
    levels, query_len, window = case
    plan = BatchPlan((query_len,), (len(levels),), kv_heads=1, group=1)
    call = scored_call(setting, plan, levels, sliding_window=window)
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
        plan = BatchPlan((1,), (count,), kv_heads=1, group=1)
        call = scored_call(setting, plan, levels, logits_soft_cap=cap)
        expect_right(setting, call, run_call(setting, call), is_joined=True)


FAR_CAPS = [
    (cap, far, lens) for cap in (0.5, 30.0) for far in (80, 3e3) for lens in (1, 3)
]


@law("paged_attention", cases=["sinks", "position_bias"])
def minus_infinity_in_an_option_takes_no_weight(setting: Setting, option: str) -> None:
    """A sink of -inf changes nothing. A bias of -inf for distances past 2 is a window of 3 keys."""
    call = paged_call(BatchPlan((2, 1), (19, 5)), setting.device)
    if option == "sinks":
        off = call.changed(sinks=torch.full((call.query.shape[1],), -math.inf))
        meant = call
    else:
        bias = torch.zeros(call.query.shape[1], 9)
        bias[:, :2] = -math.inf
        off = call.changed(position_bias=bias)
        meant = call.changed(sliding_window=3)
    expect_right(setting, meant, run_call(setting, off))


@law("paged_attention", cases=FAR_CAPS)
def scores_far_beyond_a_soft_cap_are_the_cap(
    setting: Setting, case: tuple[float, float, int]
) -> None:
    """Exponentials of 89 are infinite in float32; the scores are up to 3,000 caps."""
    cap, far, query_len = case
    factors = (0.0, 1.0, -1.0, 0.6, 1e-3 / far)
    levels = [cap * far * factors[position % 5] for position in range(40)]
    plan = BatchPlan((query_len,), (len(levels),), kv_heads=1, group=1)
    call = scored_call(setting, plan, levels, logits_soft_cap=cap)
    expect_right(setting, call, run_call(setting, call), is_joined=True)


@dataclass(frozen=True)
class Level:
    """A batch whose scores have one magnitude.

    Args:
        score: The largest magnitude of a score, with a sign.
        needle: Optional. Position of the key with the largest score; the others have half of a
            positive score, or twice a negative one. If None, all keys have the same score.
        kind: The option that is set.
        keys: Keys of the longest request.
        dtype: Element type.
    """

    score: float
    needle: int | None = None
    kind: str = "plain"
    keys: int = 40
    dtype: torch.dtype = torch.float32

    def levels(self) -> list[float]:
        """Return the score of each key."""
        if self.needle is None:
            return [self.score] * self.keys
        small, large = sorted((self.score, self.score / 2))
        levels = [small] * self.keys
        levels[self.needle] = large
        return levels

    def call(
        self, setting: Setting, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
    ) -> Call:
        """Return a call of paged attention with a result for the log-sum-exp."""
        plan = BatchPlan(query_lens, key_lens, group=2, dtype=self.dtype)
        call = scored_call(setting, plan, self.levels())
        heads = call.query.shape[1]
        options: dict[str, dict[str, Any]] = {
            # half of the score, which has no weight beside it, up to the score itself
            "sinks": {
                "sinks": slopes(heads, abs(self.score)) * (1, -1)[self.score < 0]
            },
            "cap": {"logits_soft_cap": 50.0},
            "slopes": {"alibi_slopes": slopes(heads)},
        }
        call = call.changed(**options.get(self.kind, {}))
        return replace(call, wants_lse=True, out_dtype=call.dtype)


MAGNITUDES = [
    Level(sign * 10.0**exponent, kind=kind, dtype=dtype)
    for exponent, dtype, kind in (
        (2, torch.float32, "plain"),
        (3, torch.bfloat16, "sinks"),
        (4, torch.float32, "plain"),
        (5, torch.float32, "sinks"),
        (6, torch.float16, "plain"),
        (7, torch.float32, "cap"),
        (8, torch.float32, "plain"),
    )
    for sign in (1, -1)
]
EDGES = [
    Level(score, needle, dtype=dtype)
    for score, needle, dtype in (
        (1e8, 0, torch.float32),
        (1e4, 15, torch.float32),
        (-1e6, 16, torch.bfloat16),
        (1e5, 20, torch.float32),
        (-1e8, 38, torch.float32),
        (1e8, 39, torch.float16),
    )
]
LEVELS = [*MAGNITUDES, *EDGES]
LENS = (2, 1), (40, 17)
"""New tokens and keys of the requests. A needle at position 39 is after the first new token."""


@law("paged_attention", cases=[*LEVELS, Level(1e7, kind="slopes")])
def weights_of_paged_attention_sum_to_one_at_every_score(
    setting: Setting, level: Level
) -> None:
    call = level.call(setting, *LENS)
    expect_right(setting, call, run_call(setting, call), is_joined=True)


@law("encoder_attention", cases=[*LEVELS, Level(1e7, kind="slopes")])
def weights_of_encoder_attention_sum_to_one_at_every_score(
    setting: Setting, level: Level
) -> None:
    call = ragged_call(level.call(setting, *LENS))
    expect_right(setting, call, run_call(setting, call), is_joined=True)


@law("cascade_attention", cases=LEVELS)
def weights_of_a_cascade_sum_to_one_at_every_score(
    setting: Setting, level: Level
) -> None:
    """The prefix has 16 of the 40 keys."""
    call = level.call(setting, (2,), (40,))
    found = run_cascade(setting, call, call.arguments["key_cache"].shape[1])
    expect_right(setting, call, found, is_joined=True)


@law("dcp_attention", "lse_weighted_combine", cases=LEVELS)
def weights_of_combined_ranks_sum_to_one_at_every_score(
    setting: Setting, level: Level
) -> None:
    call, dealt = level.call(setting, *LENS), Dealt(*LENS, ranks=2, in_a_row=3)
    parts = run_all_ranks(setting, dealt, call)
    out, lse = setting.candidate.lse_weighted_combine(
        torch.stack([out_of_part for out_of_part, _ in parts]),
        torch.stack(
            [lse_of_part.T for _, lse_of_part in parts if lse_of_part is not None]
        ),
    )
    expect_right(setting, call, (out.to(call.dtype), lse.T), is_joined=True)


FEW = [*MAGNITUDES[::4], MAGNITUDES[-1], *EDGES[::2]]
"""Some levels, for operations that take long in Triton's interpreter."""
EXCHANGES = ["all_to_all", "reduce_scatter"] * 4


@law("DecodeContextParallel", cases=[*zip(FEW, EXCHANGES, strict=True)])
def weights_of_a_parallel_step_sum_to_one_at_every_score(
    setting: Setting, case: tuple[Level, str]
) -> None:
    level, exchange = case
    call = level.call(setting, *LENS)
    dealt = Dealt(*LENS, ranks=2, in_a_row=2, dtype=level.dtype)
    found = run_all(setting, Shared(dealt, exchange), call)
    out = torch.cat([answer.out for answer in found], dim=1)
    lse = torch.cat([answer.lse for answer in found])
    expect_right(setting, call, (out, lse), is_joined=True)


def run_prompts(setting: Setting, level: Level, operation: str) -> tuple[Call, Result]:
    """Return a call over one prompt, and its result on two ranks."""
    lens = (level.keys,)
    call = level.call(setting, lens, lens)
    prompts = Prompts(lens, 2, dtype=level.dtype, operation=operation)
    return call, joined_rows(setting, prompts, call)


@law("PrefillContextParallel", cases=LEVELS)
def weights_of_prompts_on_several_ranks_sum_to_one_at_every_score(
    setting: Setting, level: Level
) -> None:
    expect_right(
        setting, *run_prompts(setting, level, "PrefillContextParallel"), is_joined=True
    )


@law("RingContextParallel", cases=FEW)
def weights_of_a_ring_sum_to_one_at_every_score(setting: Setting, level: Level) -> None:
    expect_right(
        setting, *run_prompts(setting, level, "RingContextParallel"), is_joined=True
    )


def scored_latents(setting: Setting, level: Level) -> LatentBatch:
    """Return latents with the scores of a level, in their first element; the second is 1."""
    plan = LatentPlan((2,), (level.keys,), scale=1.0, dtype=level.dtype)
    batch = build_latents(setting.fit(plan), setting.device)
    scale = batch.plan.scale or (batch.plan.nope + batch.plan.rope) ** -0.5
    query, key = factors_of(abs(level.score), scale)
    for tensor in (batch.q_nope, batch.q_pe, batch.w_uk, batch.w_uv[..., 0]):
        tensor.zero_()
    batch.q_nope[..., 0] = query
    batch.w_uk[:, 0, 0] = 1
    batch.w_uv[:, 0] = 0
    batch.w_uv[:, 1, 0] = 1
    size = batch.plan.block_size
    first_new = level.keys - len(batch.kv_c)
    for position, score in enumerate(level.levels()):
        latent = batch.kv_cache[batch.rows[0][position // size], position % size]
        latent[0], latent[1] = score * key, 1
        if position >= first_new:
            new = batch.kv_c[position - first_new]
            new[0], new[1] = score * key, 1
    return batch


PLAIN = [level for level in LEVELS if level.kind == "plain"]


@law("latent_decode_attention", cases=PLAIN)
def weights_of_a_decode_over_latents_sum_to_one_at_every_score(
    setting: Setting, level: Level
) -> None:
    batch = scored_latents(setting, level)
    expect_latents(setting, batch, WAYS[0], run_latents(setting, batch, WAYS[0]))


@law("latent_prefill_attention", cases=PLAIN)
def weights_of_a_prefill_over_latents_sum_to_one_at_every_score(
    setting: Setting, level: Level
) -> None:
    """The context is read in chunks of 15 keys, which are merged."""
    batch = scored_latents(setting, level)
    found = run_latents(setting, batch, WAYS[1], max_context_chunk=15)
    expect_latents(setting, batch, WAYS[1], found, max_context_chunk=15)
