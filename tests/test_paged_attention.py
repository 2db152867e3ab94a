"""Does every new token see its whole sequence, and nothing else?"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pagetwin.conformance.generators.batches import (
    CORNERS,
    DTYPES,
    NAN,
    NEEDLES,
    Batch,
    Plan,
    build,
    plans,
)
from pagetwin.conformance.oracles.dense import (
    attend,
    judge_attention,
    judge_lse,
    same_bits,
    sees_up_to_itself,
)
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.budgets import judge_rows
from torch import Tensor

# each example runs a twin at least twice, and the interpreter is slow
FEWER = settings(max_examples=max(6, settings().max_examples // 4))


def run(twin: Twin, batch: Batch, **changes: Any) -> tuple[Tensor, Tensor]:
    """Run one twin into an output and a log-sum-exp full of NaN."""
    out, lse = batch.fresh()
    returned = twin.paged_attention(
        out=out, lse=lse, **pack_options(**batch.arguments() | changes)
    )
    assert returned is out
    return out, lse


def assert_right(twin: Twin, reference: Twin, batch: Batch) -> Tensor:
    """Assert that one twin's output and log-sum-exp keep their budgets."""
    out, lse = run(twin, batch)
    verdict, exact_lse = judge_attention(batch, out, reference)
    assert verdict.ok, verdict
    share = judge_lse(batch, lse, exact_lse)
    assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"
    return out


@given(plan=plans())
def test_the_reference_in_float64_is_textbook_attention(
    plan: Plan, reference: Twin, device: torch.device
) -> None:
    batch = build(plan, device)
    out, lse = batch.fresh(torch.float64)
    reference.paged_attention(
        **batch.arguments(), out=out, lse=lse, compute_dtype=torch.float64
    )
    exact, exact_lse = attend(batch)
    assert torch.allclose(out.cpu(), exact, rtol=1e-11, atol=1e-12)
    assert torch.allclose(lse.cpu(), exact_lse, rtol=1e-11, atol=1e-12)


@given(plan=plans())
def test_every_row_keeps_its_budget(
    plan: Plan, twin: Twin, reference: Twin, device: torch.device
) -> None:
    assert_right(twin, reference, build(plan, device))


@pytest.mark.parametrize("corner", CORNERS)
def test_the_corners_keep_their_budget(
    corner: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    assert_right(twin, reference, build(CORNERS[corner], device))


@pytest.mark.parametrize("needle", NEEDLES[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_that_outweighs_4096_others_is_found(
    needle: str, dtype: torch.dtype, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """With random keys one of 4,096 missing changes less than a rounding."""
    plan = Plan((1,), (4097,), kv_heads=1, dtype=dtype, needle=needle)
    assert_right(twin, reference, build(plan, device))


@FEWER
@given(plan=plans(dtypes=(torch.float32,)), seed=st.integers(0, 99))
def test_where_a_block_lies_does_not_matter(
    plan: Plan, seed: int, twin: Twin, device: torch.device
) -> None:
    batch = build(plan, device)
    before = run(twin, batch)
    num_blocks = batch.key_cache.shape[0]
    generator = torch.Generator().manual_seed(seed)
    moved_to = torch.randperm(num_blocks, generator=generator).to(device)
    caches = []
    for cache in (batch.key_cache, batch.value_cache):
        moved = torch.full_like(cache, NAN)
        moved[moved_to] = cache
        caches.append(moved)
    table = batch.block_table.clone()
    for req, row in enumerate(batch.rows):
        table[req, : len(row)] = moved_to[row].int()
    after = run(
        twin, batch, key_cache=caches[0], value_cache=caches[1], block_table=table
    )
    for one, other in zip(before, after, strict=True):
        assert same_bits(one, other)


@FEWER
@given(plan=plans(max_reqs=3), data=st.data())
def test_a_row_does_not_know_its_neighbours(
    plan: Plan, data: st.DataObject, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """The same request alone and in a batch gives the same result, within its budget."""
    assume(any(plan.query_lens))
    batch = build(plan, device)
    together, _ = run(twin, batch)
    live = [req for req, query_len in enumerate(plan.query_lens) if query_len]
    req = data.draw(st.sampled_from(live))
    start = sum(plan.query_lens[:req])
    own = slice(start, start + plan.query_lens[req])
    alone = replace(
        batch,
        plan=replace(
            plan,
            query_lens=plan.query_lens[req : req + 1],
            kv_lens=plan.kv_lens[req : req + 1],
            padding=0,
        ),
        query=batch.query[own],
        block_table=batch.block_table[req : req + 1],
        query_start_loc=torch.tensor([0, plan.query_lens[req]], dtype=torch.int32).to(
            device
        ),
        seq_lens=batch.seq_lens[req : req + 1],
        rows=batch.rows[req : req + 1],
    )
    out = assert_right(twin, reference, alone)
    assert judge_attention(alone, together[own], reference)[0].ok
    assert out.shape == together[own].shape


@FEWER
@given(
    kv_len=st.integers(2, 40),
    dtype=st.sampled_from(DTYPES),
    needle=st.sampled_from(NEEDLES),
    data=st.data(),
)
def test_a_prompt_in_chunks_is_the_prompt_in_one(
    kv_len: int,
    dtype: torch.dtype,
    needle: str,
    data: st.DataObject,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    plan = Plan((kv_len,), (kv_len,), dtype=dtype, needle=needle, group=1)
    batch = build(plan, device)
    cuts = data.draw(st.sets(st.integers(1, kv_len - 1), max_size=3))
    edges = [0, *sorted(cuts), kv_len]
    out, lse = batch.fresh()
    for begin, end in itertools.pairwise(edges):
        twin.paged_attention(
            batch.query[begin:end],
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            torch.tensor([end], dtype=torch.int32, device=device),
            end - begin,
            end,
            scale=plan.scale,
            out=out[begin:end],
            lse=lse[:, begin:end],
        )
    verdict, exact_lse = judge_attention(batch, out, reference)
    assert verdict.ok, f"cuts {edges}: {verdict}"
    assert judge_lse(batch, lse, exact_lse) <= 1


def test_token_by_token_is_the_prompt_in_one(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Every query as a request of its own, all reading one row's blocks."""
    kv_len = 35
    prompt = build(Plan((kv_len,), (kv_len,), group=3, needle="block edge"), device)
    out, lse = prompt.fresh()
    twin.paged_attention(
        prompt.query,
        prompt.key_cache,
        prompt.value_cache,
        prompt.block_table.repeat(kv_len, 1),
        torch.arange(kv_len + 1, dtype=torch.int32, device=device),
        torch.arange(1, kv_len + 1, dtype=torch.int32, device=device),
        1,
        kv_len,
        out=out,
        lse=lse,
    )
    verdict, exact_lse = judge_attention(prompt, out, reference)
    assert verdict.ok, verdict
    assert judge_lse(prompt, lse, exact_lse) <= 1


@FEWER
@given(plan=plans(max_reqs=3), poison=st.sampled_from([0.0, float("inf"), 1e4]))
def test_what_nobody_owns_never_shows(
    plan: Plan, poison: float, twin: Twin, device: torch.device
) -> None:
    """NaN or anything else in unowned slots, table tails and padding: not a bit changes."""
    batch = build(plan, device)
    before = run(twin, batch)
    caches = []
    for cache in (batch.key_cache, batch.value_cache):
        caches.append(torch.where(cache.isnan(), poison, cache))
    table = batch.block_table.clone()
    for req, row in enumerate(batch.rows):
        table[req, len(row) :] = 0
    query = batch.query.clone()
    query[batch.tokens :] = poison
    after = run(
        twin,
        batch,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        query=query,
    )
    for one, other in zip(before, after, strict=True):
        assert same_bits(one, other)


@FEWER
@given(plan=plans())
def test_padding_rows_are_zero_and_their_log_sum_exp_minus_infinity(
    plan: Plan, twin: Twin, device: torch.device
) -> None:
    batch = build(replace(plan, padding=plan.padding + 1), device)
    out, lse = run(twin, batch)
    assert bool((out[batch.tokens :] == 0).all())
    assert bool((lse[:, batch.tokens :] == -torch.inf).all())
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(lse[:, : batch.tokens]).all())


@FEWER
@given(plan=plans(max_reqs=3))
def test_the_inputs_stay_as_they_are(
    plan: Plan, twin: Twin, device: torch.device
) -> None:
    batch = build(plan, device)
    tensors = {
        name: value
        for name, value in batch.arguments().items()
        if isinstance(value, Tensor)
    }
    before = {name: value.clone() for name, value in tensors.items()}
    run(twin, batch)
    for name, value in tensors.items():
        assert same_bits(before[name], value), name


def test_every_argument_changes_something(twin: Twin, device: torch.device) -> None:
    batch = build(Plan((3, 2), (20, 20), group=1), device)
    before, before_lse = run(twin, batch)
    changes: dict[str, dict[str, Any]] = {
        "query": {"query": batch.query * 2},
        "key_cache": {"key_cache": batch.key_cache * 2},
        "value_cache": {"value_cache": batch.value_cache * 2},
        "scale": {"scale": 0.9},
        "block_table": {"block_table": batch.block_table.flip(0)},
        "seq_lens": {"seq_lens": batch.seq_lens - 1},
        "query_start_loc": {
            "query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32).to(device)
        },
    }
    for name, change in changes.items():
        out, lse = run(twin, batch, **change)
        assert not torch.allclose(out, before, atol=1e-3), name
        if name != "value_cache":
            assert not torch.allclose(lse, before_lse, atol=1e-3), name


def test_upper_bounds_may_lie_above_the_truth(twin: Twin, device: torch.device) -> None:
    """max_query_len and max_seq_len only bound the work."""
    batch = build(Plan((3, 1), (20, 9), spare_blocks=3), device)
    before = run(twin, batch)
    after = run(twin, batch, max_query_len=64, max_seq_len=5 * 16)
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_the_scale_defaults_to_one_over_the_root_of_the_head_size(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3,), (20,), head_size=16), device)
    out, _ = run(twin, batch)
    assert same_bits(out, run(twin, batch, scale=0.25)[0])


def test_an_output_is_made_where_none_is_given(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 1), (20, 9), padding=2), device)
    out = twin.paged_attention(**batch.arguments())
    assert out.dtype == batch.query.dtype and out.device == batch.query.device
    assert same_bits(out, run(twin, batch)[0])


def test_an_output_may_be_a_view_with_any_strides(
    twin: Twin, device: torch.device
) -> None:
    """A layer's output is often a slice; writing past its rows once spoilt its neighbour."""
    batch = build(Plan((3, 1), (20, 9), padding=1, group=2), device)
    tokens, heads, head_size = batch.query.shape
    wide = torch.full((tokens, heads, 2 * head_size), NAN, device=device)
    out = wide[..., :head_size]
    twin.paged_attention(**batch.arguments(), out=out)
    assert same_bits(out, run(twin, batch)[0])
    assert bool(wide[..., head_size:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_do_not_overflow(
    dtype: torch.dtype, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Scores of some hundreds overflow exp() unless the row's maximum is taken away first."""
    plan = Plan((4, 1), (40, 70), dtype=dtype, scale=40.0, needle="none")
    out, lse = run(twin, build(plan, device))
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())
    exact, exact_lse = attend(build(plan))
    if dtype == torch.float32:
        assert torch.allclose(out.cpu().double(), exact, atol=2e-3)
    assert torch.allclose(lse.cpu().double(), exact_lse, rtol=1e-5)


def test_blocks_past_two_billion_elements_are_found(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """block id * block stride passes 2**31 here; in 32 bits it wraps to memory before the cache."""
    small = build(
        Plan((2, 1), (33, 20), kv_heads=1, head_size=64, dtype=torch.float16), device
    )
    stride = 16 * 64
    num_blocks = 2**31 // stride + 70
    # nothing is touched but the pages that are used, so this costs addresses and no memory
    caches = [
        torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16, device=device)
        for _ in range(2)
    ]
    table = small.block_table.clone()
    high = num_blocks - 1
    for req, row in enumerate(small.rows):
        for entry, block_id in enumerate(row):
            table[req, entry] = high
            caches[0][high] = small.key_cache[block_id]
            caches[1][high] = small.value_cache[block_id]
            high -= 1
    assert high * stride > 2**31
    big = run(
        twin, small, key_cache=caches[0], value_cache=caches[1], block_table=table
    )
    for one, other in zip(run(twin, small), big, strict=True):
        assert same_bits(one, other)


def test_queries_that_lie_far_apart_are_found(twin: Twin, device: torch.device) -> None:
    """A slice of a long tensor: token * stride passes 2**31 at the third token."""
    batch = build(
        Plan((3,), (20,), kv_heads=1, group=1, head_size=64, dtype=torch.float16),
        device,
    )
    stride = 2**30 + 64
    long = torch.empty(2 * stride + 64, dtype=torch.float16, device=device)
    query = long.as_strided((3, 1, 64), (stride, 64, 1))
    query.copy_(batch.query)
    for one, other in zip(run(twin, batch), run(twin, batch, query=query), strict=True):
        assert same_bits(one, other)


def test_lengths_and_starts_may_be_views_with_any_strides(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 1), (20, 9)), device)
    before = run(twin, batch)
    changes = {}
    for name in ("query_start_loc", "seq_lens", "block_table"):
        wide = getattr(batch, name).repeat_interleave(2, dim=-1).clone()
        wide[..., 1::2] = 10**6
        changes[name] = wide[..., ::2]
    for one, other in zip(before, run(twin, batch, **changes), strict=True):
        assert same_bits(one, other)


BROKEN = {
    "drops the last key": {
        "sees": lambda q, k, ql, kl: sees_up_to_itself(q, k, ql, kl) and k < kl - 1
    },
    "drops the first key": {
        "sees": lambda q, k, ql, kl: sees_up_to_itself(q, k, ql, kl) and k > 0
    },
    "sees one key too many": {
        "sees": lambda q, k, ql, kl: sees_up_to_itself(q, k - 1, ql, kl)
    },
    "hides its own key": {
        "sees": lambda q, k, ql, kl: sees_up_to_itself(q, k + 1, ql, kl)
    },
    "aligns queries with the sequence's start": {"sees": lambda q, k, ql, kl: k <= q},
    "maps heads round robin": {"kv_head": lambda h, q, kv: h % kv},
    "reads one kv head": {"kv_head": lambda h, q, kv: 0},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_judge_rejects_attention_that(fault: str, reference: Twin) -> None:
    needle = {"drops the first key": "first"}.get(fault, "last")
    batch = build(Plan((3, 2), (40, 19), kv_heads=2, group=2, needle=needle))
    good, good_lse = attend(batch)
    assert judge_attention(batch, good.float(), reference)[0].ok
    assert judge_lse(batch, good_lse, good_lse) <= 1
    out, _ = attend(batch, **BROKEN[fault])
    assert not judge_attention(batch, out.float(), reference)[0].ok


def test_only_a_needle_and_the_log_sum_exp_show_one_key_of_4096(
    reference: Twin,
) -> None:
    """A fixed tolerance of 1e-2 passes a kernel that drops the last key of 4,096."""

    def drops_the_last(batch: Batch) -> tuple[Tensor, Tensor]:
        return attend(batch, sees=lambda q, k, ql, kl: k < kl - 1)

    plan = Plan((1,), (4096,), kv_heads=1, dtype=torch.bfloat16)
    random, needle = build(plan), build(replace(plan, needle="last"))
    out, lse = drops_the_last(random)
    exact, exact_lse = attend(random)
    assert torch.allclose(out, exact, rtol=1e-2, atol=1e-2)
    assert judge_lse(random, lse, exact_lse) > 1
    out, _ = drops_the_last(needle)
    exact, _ = attend(needle)
    same, _ = attend(needle, dtype=torch.bfloat16)
    assert not judge_rows(out, exact, same, torch.bfloat16).ok
