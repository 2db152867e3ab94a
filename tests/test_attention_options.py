"""Window, soft cap, ALiBi and sinks mean the same in every batch, on both twins."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import NAN, Batch, Plan, build, plans
from conftest import Twin
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import judge_rows, score_size
from torch import Tensor

FEWER = settings(max_examples=min(25, settings().max_examples))
EDGES = (15, 16, 17, 31, 32, 33)


def dense(batch: Batch, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in float64, score by score and row by row."""
    query = batch.query.cpu().double()
    key_cache, value_cache = batch.key_cache.cpu(), batch.value_cache.cpu()
    block_size, kv_heads, head_size = key_cache.shape[1:]
    tokens, heads, _ = query.shape
    scale = batch.plan.scale or head_size**-0.5
    window, cap = options.get("sliding_window"), options.get("logits_soft_cap")
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    out = torch.zeros(tokens, heads, head_size, dtype=torch.float64)
    lse = torch.full((heads, tokens), -torch.inf, dtype=torch.float64)
    token = 0
    for query_len, kv_len, row in zip(
        batch.plan.query_lens, batch.plan.kv_lens, batch.rows, strict=True
    ):
        for own in range(kv_len - query_len, kv_len):
            first = 0 if window is None else max(0, own - window + 1)
            seen = range(first, own + 1)
            slots = [(row[p // block_size], p % block_size) for p in seen]
            for head in range(heads):
                kv_head = head * kv_heads // heads
                keys = torch.stack(
                    [key_cache[b, o, kv_head] for b, o in slots]
                ).double()
                values = torch.stack([value_cache[b, o, kv_head] for b, o in slots])
                scores = keys @ query[token, head] * scale
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                if slopes is not None:
                    away = torch.tensor(list(seen), dtype=torch.float64) - own
                    scores = scores + slopes[head].double().cpu() * away
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double().cpu()])
                lse[head, token] = scores.logsumexp(0)
                weights = torch.exp(scores - lse[head, token])[: len(slots)]
                out[token, head] = weights @ values.double()
            token += 1
    return out, lse


@st.composite
def all_options(draw: st.DrawFn) -> dict[str, Any]:
    """Draw any combination of options; tensors are made once the heads are known."""
    return {
        "sliding_window": draw(st.none() | st.sampled_from((1, 2, 7, *EDGES, 1000))),
        "logits_soft_cap": draw(st.none() | st.sampled_from((0.5, 5.0, 50.0))),
        "alibi_slopes": draw(st.none() | st.sampled_from((0.01, 1.0))),
        "sinks": draw(st.none() | st.sampled_from((-30.0, 0.0, 2.0, 60.0))),
    }


def per_head(options: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Return options whose slopes and sinks differ from head to head."""
    heads = batch.query.shape[1]
    steps = torch.arange(1, heads + 1, dtype=torch.float32, device=batch.query.device)
    made = {name: value for name, value in options.items() if value is not None}
    if "alibi_slopes" in made:
        made["alibi_slopes"] = made["alibi_slopes"] * steps / heads
    if "sinks" in made:
        made["sinks"] = made["sinks"] + steps / 4
    return made


def assert_right(
    twin: Twin, reference: Twin, batch: Batch, options: dict[str, Any]
) -> None:
    exact, exact_lse = dense(batch, options)
    arguments = batch.arguments() | options
    same = reference.paged_attention(**arguments, compute_dtype=batch.plan.dtype)
    sizes = reference.paged_attention(
        **(arguments | {"value_cache": batch.value_cache.abs()})
    )
    out, lse = batch.fresh()
    twin.paged_attention(**arguments, out=out, lse=lse)
    verdict = judge_rows(out.cpu(), exact, same.cpu(), batch.plan.dtype, sizes.cpu())
    assert verdict.ok, verdict
    # padding rows behind the last request saw nothing
    assert bool((lse.cpu()[:, batch.tokens :] == -torch.inf).all())
    exact_lse, lse = exact_lse[:, : batch.tokens], lse.cpu()[:, : batch.tokens]
    # a score is off by roundings of its products, an ALiBi bias and a sink by one of themselves
    budget = 1 + score_size(batch) + exact_lse.abs()
    budget = 8 * torch.finfo(torch.float32).eps * budget
    error = (lse.double() - exact_lse).abs()
    assert bool((error <= budget).all()), (error / budget).max()


@FEWER
@given(
    plan=plans(max_reqs=3, dtypes=(torch.float16, torch.float32)), options=all_options()
)
def test_any_combination_keeps_its_budget(
    plan: Plan,
    options: dict[str, Any],
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    batch = build(replace(plan, needle="none"), device)
    assert_right(twin, reference, batch, per_head(options, batch))


@pytest.mark.parametrize("window", EDGES)
@pytest.mark.parametrize("query_len", [1, 40])
def test_a_window_hides_the_same_keys_in_prefill_and_decode(
    window: int, query_len: int, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Decode once ignored the window: it saw all keys while prefill saw the last 8."""
    plan = Plan((query_len,), (90,), kv_heads=1, dtype=torch.float32)
    batch = build(plan, device)
    assert_right(twin, reference, batch, {"sliding_window": window})


@pytest.mark.parametrize("lens", [(200, 170), (133, 141), (90, 75), (1000, 511)])
def test_keys_before_every_window_are_never_read(
    lens: tuple[int, int], twin: Twin, device: torch.device
) -> None:
    """A window's blocks are given away behind it, and then hold anything.

    A tile that began before the window once brought their NaN in, with weight 0.
    """
    plan = Plan((1, 3), lens, kv_heads=1, dtype=torch.float32)
    batch = build(plan, device)
    options = {"sliding_window": 8}
    before = twin.paged_attention(**batch.arguments(), **options)
    for req, (query_len, kv_len) in enumerate(
        zip(plan.query_lens, plan.kv_lens, strict=True)
    ):
        gone = (kv_len - query_len + 1 - 8) // 16
        batch.key_cache[batch.rows[req][:gone]] = NAN
        batch.value_cache[batch.rows[req][:gone]] = NAN
        assert gone > 2
    after = twin.paged_attention(**batch.arguments(), **options)
    assert torch.equal(before, after)


def test_every_option_changes_something(twin: Twin, device: torch.device) -> None:
    batch = build(Plan((1, 20), (70, 20), dtype=torch.float32), device)
    plain = twin.paged_attention(**batch.arguments())
    every = {
        "sliding_window": 5,
        "logits_soft_cap": 0.3,
        "alibi_slopes": 0.5,
        "sinks": 1.0,
    }
    for name, value in every.items():
        option = per_head({name: value}, batch)
        assert not torch.allclose(
            plain, twin.paged_attention(**batch.arguments(), **option), atol=1e-3
        ), name


def test_a_sink_far_above_all_scores_takes_all_weight(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((1, 20), (70, 20), dtype=torch.float32), device)
    sinks = torch.full((batch.query.shape[1],), 1e4, device=device)
    out, lse = batch.fresh()
    twin.paged_attention(**batch.arguments(), sinks=sinks, out=out, lse=lse)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.allclose(lse, torch.full_like(lse, 1e4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sliding_window": 0}, "sliding_window = 0: expected at least 1"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap = 0.0: expected a number above 0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap = -1.0"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes has shape [3]: expected [4]"),
        ({"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks is torch.float64"),
    ],
)
def test_an_option_out_of_range_is_refused(
    options: dict[str, Any], words: str, twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((1,), (5,)), device)
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    with pytest.raises((ValueError, TypeError)) as caught:
        twin.raw.paged_attention(**batch.arguments(), **moved)
    assert words in str(caught.value)
