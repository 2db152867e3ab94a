"""Calls of the Hopper kernels on test batches, and the check of their rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.cases.batches import build as build_alike
from pagetwin.conformance.checks.dense import judge_attention, judge_lse
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.budgets import judge_rows
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


def build_sizes(
    plan: BatchPlan, key_size: int, value_size: int, device: str = "cpu"
) -> BatchTensors:
    """Return the tensors of a plan with other head sizes, of keys and of values."""
    batch = build_alike(replace(plan, head_size=max(key_size, value_size)), device)
    return replace(
        batch,
        query=batch.query[..., :key_size],
        key_cache=batch.key_cache[..., :key_size],
        value_cache=batch.value_cache[..., :value_size],
        plan=replace(batch.plan, head_size=key_size),
    )


def make_options(
    batch: BatchTensors, given: dict[str, Any], **more: Any
) -> AttentionOptions:
    """Return the options of a causal call, with a sink per head if there are sinks."""
    if "sinks" in given:
        heads = batch.query.shape[1]
        sinks = torch.linspace(-3.0, 4.0, heads, device=batch.query.device)
        given = {**given, "sinks": sinks}
    return AttentionOptions(causal=True, **given, **more)


def check_supported(
    family: Any, call: AttentionCall, is_supported: bool, patch: pytest.MonkeyPatch
) -> None:
    """Assert that a family supports a call on a Hopper chip, or rejects it."""
    patch.setattr(family, "is_hopper", lambda device: True)
    assert family.supports(call) == is_supported
    if not is_supported:
        with pytest.raises(NotImplementedError, match="does not support this call"):
            family.plan(call)


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


def planned(kernels: Any, call: AttentionCall) -> Any:
    """Return the launch plan of a call that a family supports.

    Args:
        kernels: The module of the family.
        call: The call.
    """
    assert kernels.supports(call)
    plan = kernels.plan(call)
    assert plan.takes(call)
    return plan


def make_plan(call: AttentionCall) -> Sm90Plan:
    """Return the prefill family's launch plan of a call that it supports."""
    plan: Sm90Plan = planned(family, call)
    return plan


def launched(
    launch: Callable[[], object], out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch into an output and a log-sum-exp full of NaN, and return both.

    The first launch goes through Triton, the second through `Launcher`.
    """
    for _ in range(2):
        out.fill_(NAN)
        lse.fill_(NAN)
        launch()
    return out, lse


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
    return launched(partial(make_plan(call).launch_prefill, call, short_rows), out, lse)


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


def assert_rows_right(
    batch: BatchTensors,
    out: Tensor,
    lse: Tensor,
    reference: Twin,
    options: AttentionOptions,
    sizes_of_values: Tensor,
) -> None:
    """Assert that the rows of each token and head are within their error budgets.

    Args:
        sizes_of_values: The value cache without signs.
    """
    given, dtype = batch.arguments(), batch.plan.dtype
    exact, sizes = (torch.full_like(out, NAN, dtype=torch.float64) for _ in range(2))
    exact_lse = torch.full_like(lse, NAN, dtype=torch.float64)
    attend = partial(reference.paged_attention, options=options)
    attend(**given, out=exact, lse=exact_lse, compute_dtype=torch.float64)
    same = attend(**given, compute_dtype=dtype)
    absolute = given | {"value_cache": sizes_of_values}
    attend(**absolute, out=sizes, compute_dtype=torch.float64)
    out, exact, same, sizes = (x.flatten(0, 1) for x in (out, exact, same, sizes))
    verdict = judge_rows(out, exact, same, dtype, sizes)
    assert verdict.ok, verdict
    share = judge_lse(batch, lse, exact_lse)
    assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"


def check_captured(
    launch: Callable[[], object],
    batch: BatchTensors,
    out: Tensor,
    lse: Tensor,
    check: Callable[[], None],
) -> None:
    """Capture a launch, and check its replays with shorter sequences."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for fewer in (0, 37, 200):
        shorter = [max(length - fewer, 2) for length in batch.plan.kv_lens]
        batch.seq_lens.copy_(torch.tensor(shorter, dtype=torch.int32))
        out.fill_(NAN)
        lse.fill_(NAN)
        graph.replay()
        check()


def check_captured_batches(
    plans: Sequence[BatchPlan],
    make_launch: Callable[[AttentionCall], Callable[[], object]],
    reference: Twin,
) -> None:
    """Capture a launch, and check its replays with other batches in its tensors.

    Args:
        plans: Batches of as many requests each. The first has the most tokens.
        make_launch: Returns the launch of a call.
        reference: The twin whose results are the expected ones.
    """
    batches = [build(plan, "cuda") for plan in plans]
    first = batches[0]
    blocks = max(batch.key_cache.shape[0] for batch in batches)
    columns = max(batch.block_table.shape[1] for batch in batches)
    caches = [
        first.key_cache.new_full((blocks, *first.key_cache.shape[1:]), NAN)
        for _ in range(2)
    ]
    live = replace(
        first,
        query=torch.empty_like(first.query),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=first.block_table.new_zeros(len(first.block_table), columns),
        query_start_loc=first.query_start_loc.clone(),
        seq_lens=first.seq_lens.clone(),
        max_query_len=max(batch.max_query_len for batch in batches),
    )

    def copy(batch: BatchTensors) -> None:
        live.query.zero_()
        live.query[: batch.query.shape[0]] = batch.query
        contents = batch.key_cache, batch.value_cache
        for cache, content in zip(caches, contents, strict=True):
            cache[: content.shape[0]] = content
        live.block_table[:, : batch.block_table.shape[1]] = batch.block_table
        live.query_start_loc.copy_(batch.query_start_loc)
        live.seq_lens.copy_(batch.seq_lens)

    out, lse = first.fresh()
    launch = make_launch(to_call(live, out, lse))
    copy(first)
    launch()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for batch in batches * 2:
        copy(batch)
        out.fill_(NAN)
        lse.fill_(NAN)
        graph.replay()
        padded = replace(batch, query=live.query)
        verdict, exact_lse = judge_attention(padded, out, reference)
        assert verdict.ok, verdict
        assert judge_lse(padded, lse, exact_lse) <= 1
        assert bool((out[batch.tokens :] == 0).all())


@pytest.fixture(autouse=True)
def own_counters() -> Iterator[None]:
    """Start every test without counters, so that a failed test does not affect the next."""
    workspace.release_workspace()
    yield
