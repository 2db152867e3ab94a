"""Calls of the Hopper kernels on test batches, and the check of their rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.cases.batches import build as build_alike
from pagetwin.conformance.checks.dense import judge_attention, judge_lse
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.common.plan import Sm90Plan
from pagetwin.optimized.kernels.sm90.prefill import family
from pagetwin.optimized.runtime import workspace
from pagetwin.optimized.runtime.attention_call import AttentionCall
from torch import Tensor

from support.twins import Twin

NAN = float("nan")
CAUSAL = AttentionOptions(causal=True)


IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def needs_hopper(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test anywhere but on a CUDA device of capability 9.0."""
    reason = "needs a CUDA device of capability 9.0"
    return pytest.mark.cuda(pytest.mark.skipif(not IS_HOPPER, reason=reason)(test))


def build(plan: BatchPlan, device: str = "cpu") -> BatchTensors:
    """Return the tensors of a plan. Head size 192 is that of queries and keys: values have 128."""
    batch = build_alike(plan, device)
    if plan.head_size != 192:
        return batch
    return replace(batch, value_cache=batch.value_cache[..., :128])


def to_call(
    batch: BatchTensors,
    out: Tensor,
    lse: Tensor | None,
    options: AttentionOptions = CAUSAL,
) -> AttentionCall:
    """Return the call that computes a batch."""
    plan = batch.plan
    return AttentionCall(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.max_query_len,
        int(max(plan.kv_lens)),
        plan.head_size**-0.5 if plan.scale is None else plan.scale,
        out,
        lse,
        options,
    )


def make_plan(call: AttentionCall) -> Sm90Plan:
    """Return the Hopper family's launch plan of a call that it supports."""
    assert family.supports(call)
    plan = family.plan(call)
    assert plan.takes(call)
    return plan


def run(
    batch: BatchTensors,
    short_rows: int = 0,
    options: AttentionOptions = CAUSAL,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel into an output and a log-sum-exp full of NaN."""
    fresh, lse = batch.fresh()
    out = fresh if out is None else out
    call = to_call(batch, out, lse, options)
    plan = make_plan(call)
    # the first launch goes through Triton, the second through `Launcher`
    for _ in range(2):
        out.fill_(NAN)
        lse.fill_(NAN)
        plan.launch_prefill(call, short_rows)
    return out, lse


def assert_right(
    batch: BatchTensors,
    reference: Twin,
    short_rows: int = 0,
    options: AttentionOptions = CAUSAL,
) -> None:
    """Assert that computed rows are within their error budgets, and others are unchanged.

    Without short rows, those of no request are cleared.
    """
    out, lse = run(batch, short_rows, options)
    attend = partial(reference.paged_attention, options=options)
    start = 0
    skipped = torch.ones(batch.query.shape[0], dtype=torch.bool, device=out.device)
    for query_len in batch.plan.query_lens:
        if query_len * batch.plan.group > short_rows:
            skipped[start : start + query_len] = False
        start += query_len
    if not short_rows and make_plan(to_call(batch, out, lse, options)).clears_padding:
        assert bool((out[start:] == 0).all() and (lse[:, start:] == -torch.inf).all())
        skipped[start:] = False
    assert bool(out[skipped].isnan().all())
    assert bool(lse[:, skipped].isnan().all())
    right, right_lse = batch.fresh()
    attend(**batch.arguments(), out=right, lse=right_lse)
    out[skipped] = right[skipped]
    lse[:, skipped] = right_lse[:, skipped]
    judged = SimpleNamespace(paged_attention=attend)
    verdict, exact_lse = judge_attention(batch, out, judged)
    assert verdict.ok, verdict
    share = judge_lse(batch, lse, exact_lse)
    assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"


@pytest.fixture(autouse=True)
def own_counters() -> Iterator[None]:
    """Start every test without counters, so that a failed test does not affect the next."""
    workspace.release_workspace()
    yield
