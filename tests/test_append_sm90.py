"""Tests of the Hopper append kernel: supported calls, segments, and results on a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Twin
from pagetwin.conformance.generators.batches import BatchPlan, BatchTensors
from pagetwin.conformance.oracles.dense import judge_attention, judge_lse, same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.append import family
from pagetwin.optimized.launch import workspace
from test_prefill_sm90 import BF16, FP16, NAN, build, needs_hopper, to_call
from torch import Tensor


@pytest.fixture(autouse=True)
def own_workspace() -> Iterator[None]:
    """Start every test without a workspace, so that a failed test does not affect the next."""
    workspace.release_workspace()
    yield


def run(
    batch: BatchTensors, options: AttentionOptions, has_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Launch the kernels into an output and a log-sum-exp full of NaN."""
    out, lse = batch.fresh()
    call = to_call(batch, out, lse if has_lse else None, options)
    assert family.supports(call)
    plan = family.plan(call)
    assert plan.takes(call)
    # the first launch goes through Triton, the second through `Launcher`
    for _ in range(2):
        out.fill_(NAN)
        lse.fill_(NAN)
        plan.launch(call)
    return out, lse


class Way(NamedTuple):
    """A kind of call."""

    head_size: int
    dtype: torch.dtype
    group: int
    block_size: int
    options: dict[str, Any]

    def __str__(self) -> str:
        dtype = str(self.dtype).rpartition(".")[2]
        words = (self.head_size, dtype, self.group, self.block_size, *self.options)
        return " ".join(map(str, words))


WAYS = [
    Way(128, BF16, 4, 16, {}),
    Way(64, BF16, 8, 16, {"sinks": True}),
    Way(256, BF16, 2, 16, {}),
    Way(128, BF16, 4, 16, {"sliding_window": 700}),
    Way(128, FP16, 7, 32, {"logits_soft_cap": 20.0, "sinks": True}),
    Way(96, BF16, 1, 16, {}),
    Way(192, BF16, 1, 16, {}),
    Way(64, BF16, 2, 64, {"sliding_window": 100}),
    Way(128, BF16, 3, 16, {"attention_chunk_size": 300}),
]
# new tokens and keys per request, and the needle
LENS = {
    "one request": ((6,), (5000,), "tile edge"),
    "verification": ((6,) * 9, (1100,) * 9, "none"),
    "ragged": ((1, 20, 0, 64, 5, 9, 3), (50, 2200, 40, 3001, 130, 5, 700), "first new"),
    "several query tiles": ((150, 1, 70), (3300, 1290, 70), "first new"),
    "more requests than a pass": ((5,) * 300, (10, 260, 130) * 100, "none"),
}


def make_options(given: dict[str, Any], heads: int) -> AttentionOptions:
    """Return the options of a causal call, with a sink per head if named."""
    if "sinks" in given:
        given = {**given, "sinks": torch.linspace(-3.0, 4.0, heads, device="cuda")}
    return AttentionOptions(causal=True, **given)


@needs_hopper
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_row_is_within_its_error_budget(way: Way, reference: Twin) -> None:
    """Also rows of no key, of several segments, and padding."""
    wrong: list[tuple[str, str]] = []
    for name, (query_lens, kv_lens, needle) in LENS.items():
        plan = BatchPlan(
            query_lens, kv_lens, needle=needle, padding=5, spare_max=9,
            head_size=way.head_size, dtype=way.dtype, group=way.group,
            block_size=way.block_size,
        )  # fmt: skip
        batch = build(plan, "cuda")
        options = make_options(way.options, batch.query.shape[1])
        attend = partial(reference.paged_attention, options=options)
        out, lse = run(batch, options)
        verdict, exact_lse = judge_attention(
            batch, out, SimpleNamespace(paged_attention=attend)
        )
        if not verdict.ok:
            wrong.append((name, str(verdict)))
        share = judge_lse(batch, lse, exact_lse)
        if not share <= 1:
            wrong.append((name, f"log-sum-exp: {share}"))
        if not bool((out[batch.tokens :] == 0).all()):
            wrong.append((name, "padding"))
        if not bool((lse[:, batch.tokens :] == -torch.inf).all()):
            wrong.append((name, "log-sum-exp of padding"))
        if not way.options.get("logits_soft_cap"):
            # a soft cap without a log-sum-exp has another tanh
            alone = run(batch, options, has_lse=False)[0]
            if not same_bits(out, alone):
                wrong.append((name, "without a log-sum-exp"))
    assert not wrong


@needs_hopper
def test_one_captured_launch_serves_other_lengths(reference: Twin) -> None:
    plans = [
        BatchPlan((20, 3, 60), (3000, 40, 129), head_size=128, dtype=BF16, group=4),
        BatchPlan((13, 0, 64), (129, 40, 3000), head_size=128, dtype=BF16, group=4, seed=1),
        BatchPlan((1, 5, 77), (50, 2200, 1300), head_size=128, dtype=BF16, group=4, seed=2),
    ]  # fmt: skip
    batches = [build(plan, "cuda") for plan in plans]
    blocks = max(batch.key_cache.shape[0] for batch in batches)
    columns = max(batch.block_table.shape[1] for batch in batches)
    first = batches[0]
    caches = [
        torch.full((blocks, *first.key_cache.shape[1:]), NAN, dtype=BF16, device="cuda")
        for _ in range(2)
    ]
    live = replace(
        first,
        query=torch.empty_like(first.query),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=torch.zeros(3, columns, dtype=torch.int32, device="cuda"),
        query_start_loc=first.query_start_loc.clone(),
        seq_lens=first.seq_lens.clone(),
        max_query_len=77,
    )
    out, lse = first.fresh()
    call = to_call(live, out, lse, AttentionOptions(causal=True))
    plan = family.plan(call)
    live.query.copy_(first.query)
    live.block_table[:, : first.block_table.shape[1]] = first.block_table
    plan.launch(call)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch(call)
    for _ in range(2):
        for batch in batches:
            live.query.zero_()
            live.query[: batch.query.shape[0]] = batch.query
            for cache, content in zip(
                caches, (batch.key_cache, batch.value_cache), strict=True
            ):
                cache[: content.shape[0]] = content
            live.block_table[:, : batch.block_table.shape[1]] = batch.block_table
            live.query_start_loc.copy_(batch.query_start_loc)
            live.seq_lens.copy_(batch.seq_lens)
            out.fill_(NAN)
            lse.fill_(NAN)
            graph.replay()
            tokens = batch.tokens
            padded = replace(batch, query=live.query)
            verdict, exact_lse = judge_attention(padded, out, reference)
            assert verdict.ok, verdict
            assert judge_lse(padded, lse, exact_lse) <= 1
            assert bool((out[tokens:] == 0).all())
