"""Laws of latent attention (MLA).

Decode projects queries into the space of the latents; prefill expands latents to keys and values.
Both must equal full multi-head attention, which the oracle computes key by key in float64.
"""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import pack_options
from ...contract.budgets import judge_rows
from ..candidates.calls.calling import Result, expect_same_results
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, NAN, NEEDLES
from ..cases.latent_batches import (
    LAYOUTS,
    LatentBatch,
    LatentPlan,
    build_latents,
    latent_plans,
)
from ..cases.options import starts_of
from ..cases.rearranging import rows_of_answer
from ..checks.canaries import checked_values, kept
from ..checks.expect import Disagreement, budgets, expect_budget, expect_same
from ..oracles.brute_force import Answer
from .law import law

WAYS = ("latent_decode_attention", "latent_prefill_attention")


def arguments_of(batch: LatentBatch, way: str) -> dict[str, Any]:
    """Return the arguments of one operation by name, its options too."""
    is_decode = way == WAYS[0]
    return batch.decode_arguments() if is_decode else batch.prefill_arguments()


def run_latents(
    setting: Setting, batch: LatentBatch, way: str, **changes: Any
) -> Result:
    """Return the candidate's results; the outputs are filled with NaN before the call."""
    tokens, heads, _ = batch.q_nope.shape
    out = batch.q_nope.new_full((tokens, heads, batch.plan.value), NAN)
    lse = torch.full((heads, tokens), NAN, device=setting.device)
    given = arguments_of(batch, way) | changes
    operation = getattr(setting.candidate, way)
    found = operation(**pack_options(**given), out=out, lse=lse)
    if found is not out:
        raise Disagreement("output", "as a whole", "another tensor", "out")
    return out, lse


def expect_latents(
    setting: Setting,
    batch: LatentBatch,
    way: str,
    found: Result,
    answer: Answer | None = None,
    **changes: Any,
) -> None:
    """Raise if a row exceeds its error budget, or a padding row is wrong."""
    out, lse = found
    assert lse is not None
    answer = batch.answer(way == WAYS[1]) if answer is None else answer
    dtype, live = batch.plan.dtype, slice(0, batch.tokens)
    same, same_lse = torch.empty_like(out), torch.empty_like(lse)
    getattr(setting.truth, way)(
        **pack_options(**arguments_of(batch, way) | changes),
        out=same,
        lse=same_lse,
        compute_dtype=dtype,
    )
    terms = answer.terms(is_joined=way == WAYS[1])
    expect_budget("output", out, answer.out, same, *terms)
    rest = lse[:, batch.tokens :].cpu()
    expect_same(
        "log-sum-exp after the last request",
        rest,
        rest.new_full(rest.shape, -torch.inf),
    )
    if not batch.tokens:
        return
    verdict = judge_rows(
        lse.T[live].cpu(),
        answer.lse.T[live],
        same_lse.T[live].cpu(),
        dtype,
        1 + answer.scores.T[live],
    )
    if not verdict.ok:
        token = verdict.row
        raise Disagreement(
            "log-sum-exp",
            f"of token {token}{budgets(verdict.worst, 'its')}",
            lse[:, token].tolist(),
            answer.lse[:, token].tolist(),
        )


EDGES = [
    LatentPlan((1, 3), (33, 20), heads=2, needle=needle, is_rope=is_rope, rope_size=size)
    for needle, is_rope, size in (
        ("last", True, 1.0),
        ("block edge", True, 1.0),
        ("first", False, 1.0),
        ("none", False, 3.0),
    )
]  # fmt: skip
"""Batches in which the rope part of a key decides, or the rest of it."""


@law("latent_decode_attention", cases=latent_plans(), edges=EDGES)
def a_decode_over_latents_is_full_multi_head_attention(
    setting: Setting, plan: LatentPlan
) -> None:
    batch = build_latents(plan, setting.device)
    expect_latents(setting, batch, WAYS[0], run_latents(setting, batch, WAYS[0]))


@law("latent_decode_attention", cases=latent_plans(), edges=EDGES[:2])
def a_decode_over_latents_attends_to_its_window_only(
    setting: Setting, plan: LatentPlan
) -> None:
    window = Random(plan.seed).choice([1, 2, 7, 16, 17, 33])
    batch = build_latents(replace(plan, sliding_window=window), setting.device)
    expect_latents(setting, batch, WAYS[0], run_latents(setting, batch, WAYS[0]))


@law("latent_prefill_attention", cases=latent_plans(), edges=EDGES)
def a_prefill_over_latents_is_full_multi_head_attention(
    setting: Setting, plan: LatentPlan
) -> None:
    """The context is processed in chunks that may end in the middle of requests."""
    batch = build_latents(plan, setting.device)
    context = sum(plan.key_lens) - batch.tokens
    pick = Random(plan.seed)
    # at most three chunks
    chunk = pick.choice([None, context // 3 + 1, context // 2 + 1, context + 5])
    changes: dict[str, Any] = {} if chunk is None else {"max_context_chunk": chunk}
    found = run_latents(setting, batch, WAYS[1], **changes)
    expect_latents(setting, batch, WAYS[1], found, **changes)


CORNERS = [
    LatentPlan((1, 3), (65, 36), heads=2, needle=needle, is_rope=is_rope)
    for needle in NEEDLES[1:]
    for is_rope in (False, True)
]
CORNERS += [
    LatentPlan((1, 9), (40, 9), heads=1, needle="first"),
    LatentPlan((1, 4), (40, 17), heads=16, needle="tile edge"),
    LatentPlan((3, 0, 1), (20, 0, 17), padding=1),
    LatentPlan((0, 0), (5, 0)),
    LatentPlan((1, 37, 1), (50, 37, 2), heads=2, needle="first new"),
    LatentPlan((1, 1), (200, 2), heads=2, dtype=torch.float16, needle="tile edge"),
    LatentPlan((2,), (20,), heads=2, rank=40, rope=24, nope=33, value=48),
]


@law(*WAYS, cases=[(way, plan) for way in WAYS for plan in CORNERS])
def a_needle_among_latents_is_found(
    setting: Setting, case: tuple[str, LatentPlan]
) -> None:
    """The needle is a latent or a rope key, at edges of blocks, tiles and context chunks."""
    way, plan = case
    batch = build_latents(plan, setting.device)
    changes: dict[str, Any] = {"max_context_chunk": 64} if way == WAYS[1] else {}
    found = run_latents(setting, batch, way, **changes)
    expect_latents(setting, batch, way, found, **changes)


@law(*WAYS, cases=[(way, plan) for way in WAYS for plan in CORNERS[-7:]])
def checking_contents_changes_nothing_over_latents(
    setting: Setting, case: tuple[str, LatentPlan]
) -> None:
    """PAGETWIN_CHECK_VALUES=1 checks the calls that the operation makes itself, too."""
    way, plan = case
    batch = build_latents(plan, setting.device)
    before = run_latents(setting, batch, way)
    with checked_values():
        found = run_latents(setting, batch, way)
    expect_same_results("with checks", found, before)


LARGE_ROPES = [
    LatentPlan(
        (1, 3), (20, 18), heads=1, cache_dtype=cache_dtype, k_scale=k_scale,
        needle=needle, rope_size=rope_size,
    )
    for cache_dtype, k_scale, rope_size in (
        (torch.float8_e5m2, 8.0, 3e4),
        (torch.float8_e4m3fn, 2.0, 200.0),
    )
    for needle in ("first", "none")
]  # fmt: skip


@law(*WAYS, cases=[(way, plan) for plan in LARGE_ROPES for way in WAYS])
def rope_keys_in_fp8_may_be_much_larger_than_their_latents(
    setting: Setting, case: tuple[str, LatentPlan]
) -> None:
    """Under the scale of the cache; float16 does not hold the largest of them."""
    way, plan = case
    batch = build_latents(plan, setting.device)
    expect_latents(setting, batch, way, run_latents(setting, batch, way))


def pieces(batch: LatentBatch, cuts: list[int]) -> list[tuple[slice, LatentBatch]]:
    """Return the chunks of a batch's only request, each with its rows."""
    length = batch.plan.key_lens[0]
    edges = [0, *cuts, length]
    found = []
    for begin, end in pairwise(edges):
        rows, device = slice(begin, end), batch.q_pe.device
        part = replace(
            batch,
            plan=replace(batch.plan, query_lens=(end - begin,), key_lens=(end,)),
            q_nope=batch.q_nope[rows],
            q_pe=batch.q_pe[rows],
            kv_c=batch.kv_c[rows],
            k_pe=batch.k_pe[rows],
            query_start_loc=starts_of([end - begin], device),
            seq_lens=starts_of([end], device)[1:],
        )
        found.append((rows, part))
    return found


@law(*WAYS, cases=[(way, seed) for way in WAYS for seed in range(4)])
def a_prompt_of_latents_in_chunks_equals_the_prompt_in_one_step(
    setting: Setting, case: tuple[str, int]
) -> None:
    """For any cuts; the other chunks may use either operation."""
    way, seed = case
    pick = Random(seed)
    length = pick.choice([2, 17, 30])
    needle = pick.choice(NEEDLES)
    plan = LatentPlan(
        (length,), (length,), heads=2, dtype=DTYPES[seed % 3], needle=needle
    )
    batch = build_latents(replace(plan, seed=seed), setting.device)
    cuts = sorted({pick.randint(1, length - 1) for _ in range(2)})
    answer = batch.answer(True)
    for rows, part in pieces(batch, cuts):
        own = rows_of_answer(answer, rows)
        its = way if rows.stop == length else WAYS[pick.randrange(2)]
        expect_latents(setting, part, its, run_latents(setting, part, its), own)


@law(*WAYS, cases=[(way, poison) for way in WAYS for poison in (0.0, torch.inf, 1e4)])
def results_are_bitwise_equal_whatever_unallocated_slots_of_latents_hold(
    setting: Setting, case: tuple[str, float]
) -> None:
    """Free slots, row tails and padding; a prefill does not read its new tokens' slots."""
    way, poison = case
    plan = LatentPlan((3, 1, 0), (20, 9, 4), layout="padded", padding=2, needle="last")
    batch = build_latents(plan, setting.device)
    before = run_latents(setting, batch, way)
    cache, table = batch.kv_cache.clone(), batch.block_table.clone()
    for req, row in enumerate(batch.rows):
        table[req, len(row) :] = 0
        if way == WAYS[1]:
            first = plan.key_lens[req] - plan.query_lens[req]
            for position in range(first, plan.key_lens[req]):
                cache[row[position // 16], position % 16] = NAN
    changes: dict[str, Any] = {
        name: torch.where(tensor.isnan(), poison, tensor)
        for name, tensor in arguments_of(batch, way).items()
        if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point
    }
    changes["kv_cache"] = torch.where(cache.isnan(), poison, cache)
    found = run_latents(setting, batch, way, **changes, block_table=table)
    expect_same_results("with other poison", found, before)


@law(*WAYS, cases=[(WAYS[1], LAYOUTS[3]), *((WAYS[0], layout) for layout in LAYOUTS)])
def latent_attention_changes_nothing_that_it_reads(
    setting: Setting, case: tuple[str, str]
) -> None:
    """Results repeat bitwise in a second call, with other blocks and with a new output."""
    way, layout = case
    plan = LatentPlan((3, 1, 5), (20, 9, 40), layout=layout, padding=1)
    batch = build_latents(plan, setting.device)
    given = arguments_of(batch, way)
    tensors = {
        name: value for name, value in given.items() if isinstance(value, Tensor)
    }
    with kept(**tensors):
        before = run_latents(setting, batch, way)
    expect_same_results("once more", run_latents(setting, batch, way), before)
    order = torch.randperm(
        len(batch.kv_cache), generator=torch.Generator().manual_seed(1)
    )
    order = order.to(setting.device)
    cache, table = batch.kv_cache.clone(), batch.block_table.clone()
    cache[order] = batch.kv_cache
    for req, row in enumerate(batch.rows):
        table[req, : len(row)] = order[row].int()
    found = run_latents(setting, batch, way, kv_cache=cache, block_table=table)
    expect_same_results("with blocks elsewhere", found, before)
    made = getattr(setting.candidate, way)(**pack_options(**given))
    expect_same("output that was made", made, before[0].cpu())


@law(*WAYS, cases=[(way, padding) for way in WAYS for padding in (0, 2)])
def nothing_is_written_outside_of_the_output_of_latent_attention(
    setting: Setting, case: tuple[str, int]
) -> None:
    way, padding = case
    batch = build_latents(LatentPlan((3, 1), (20, 9), padding=padding), setting.device)
    tokens, heads, _ = batch.q_nope.shape
    wide = torch.full((tokens + 2, 2 * heads, 16 + 3), 7.0, device=setting.device)
    tall = torch.full((heads + 1, 2 * tokens), 7.0, device=setting.device)
    out, lse = wide[1:-1, ::2, 1:17], tall[1:, ::2]
    given = pack_options(**arguments_of(batch, way))
    getattr(setting.candidate, way)(**given, out=out, lse=lse)
    expect_latents(setting, batch, way, (out, lse))
    out.fill_(7.0)
    lse.fill_(7.0)
    expect_same("around the output", wide.cpu(), torch.full(wide.shape, 7.0))
    expect_same("around the log-sum-exp", tall.cpu(), torch.full(tall.shape, 7.0))
