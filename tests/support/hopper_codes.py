"""Caches with a scale per token and head on the kernels for Hopper, in the Gluon interpreter."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.options import Call, paged_call
from pagetwin.conformance.checks.coded_caches import APART, PAGES, coded_call
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.cache_formats import FORMATS, CacheFormat
from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.kernels.sm90.code_decode.family import CodeDecodePlan
from pagetwin.optimized.kernels.sm90.code_prefill import family as code_prefill
from pagetwin.optimized.runtime.attention_call import AttentionCall
from torch import Tensor

from support.hopper_fp8 import pretend_fp8_hopper

BF16, FP16 = torch.bfloat16, torch.float16
MEASURED = [
    form
    for form in FORMATS.values()
    # what vLLM's rule writes is read as ours
    if form.has_token_scales and not form.name.endswith("vllm")
]
ORDERS = (APART, *PAGES)
RAGGED = (1, 4, 0, 2, 1), (50, 400, 40, 131, 300)
DECODES: dict[str, tuple[BatchPlan, dict[str, Any]]] = {
    "ragged": (BatchPlan(*RAGGED, head_size=64, group=4, dtype=BF16, padding=2), {}),
    "head size 128": (
        BatchPlan(
            (1, 2), (261, 70), head_size=128, group=4, dtype=BF16, block_size=48
        ),
        {},
    ),
    "float16, a group of 16": (
        BatchPlan((1, 1), (17, 300), head_size=64, group=16, dtype=FP16, kv_heads=1),
        {},
    ),
    "many segments": (
        BatchPlan((1, 1), (901, 800), head_size=64, group=4, dtype=BF16), {}
    ),
    "a window and a cap": (
        BatchPlan(*RAGGED, head_size=64, group=4, dtype=BF16),
        {"sliding_window": 90, "logits_soft_cap": 20.0},
    ),
}  # fmt: skip
PREFILLS: dict[str, tuple[BatchPlan, dict[str, Any]]] = {
    "ragged": (
        BatchPlan((1, 70, 4), (300, 336, 40), head_size=64, group=4, dtype=BF16), {}
    ),
    "128 keys without a mask": (
        BatchPlan((40, 1, 50), (140, 70, 300), head_size=128, group=4, dtype=BF16), {}
    ),
    "head size 80": (
        BatchPlan((70, 40), (170, 300), head_size=80, group=4, dtype=FP16), {}
    ),
    "a window, float16": (
        BatchPlan((5, 66), (200, 331), head_size=128, group=4, dtype=FP16),
        {"sliding_window": 100},
    ),
    "a cap": (
        BatchPlan((40, 1), (290, 70), head_size=128, group=4, dtype=BF16),
        {"logits_soft_cap": 20.0},
    ),
}  # fmt: skip

FITTED: dict[str, tuple[BatchPlan, dict[str, Any]]] = {
    "head size 80, fitted": (
        BatchPlan((70, 9), (170, 9), head_size=80, group=4, dtype=BF16), {}
    ),
    "head size 128, fitted": (
        BatchPlan((40,), (140,), head_size=128, group=4, dtype=BF16), {}
    ),
    "head size 112, fitted": (
        BatchPlan((24,), (140,), head_size=112, group=2, dtype=BF16), {}
    ),
    "a group of 3, fitted, sinks": (
        BatchPlan((40,), (170,), head_size=64, group=3, dtype=BF16, kv_heads=1),
        {"sinks": torch.tensor([-3.0, 0.5, 4.0])},
    ),
    "a window and a cap, fitted": (
        BatchPlan((40,), (170,), head_size=128, group=1, dtype=BF16, kv_heads=1),
        {"sliding_window": 70, "logits_soft_cap": 5.0},
    ),
}  # fmt: skip
"""Prefills whose bfloat16 queries are fitted to float16."""


class CodedCase(NamedTuple):
    """A call with a cache of codes.

    Args:
        plan: the batch.
        form: of the cache.
        order: of codes and scales in memory, one of ORDERS.
        options: of the call.
        is_prefill: whether the prefill kernel computes the long requests.
        is_alone: whether it computes all of them, into an output of 16 bits.
    """

    plan: BatchPlan
    form: CacheFormat
    order: str = APART
    options: dict[str, Any] = {}  # noqa: RUF012 (it is never changed)
    is_prefill: bool = False
    is_alone: bool = False


CASES = {
    f"{form.name}, {order}, {name}": CodedCase(plan, form, order, options)
    for name, (plan, options) in DECODES.items()
    for form in MEASURED
    for order in (ORDERS if name in ("ragged", "head size 128") else ORDERS[:1])
} | {
    f"{form.name}, {order}, prefill, {name}": CodedCase(plan, form, order, options, True)
    for name, (plan, options) in PREFILLS.items()
    for form in MEASURED
    for order in ORDERS
} | {
    f"{form.name}, {order}, prefill, {name}": CodedCase(
        plan, form, order, options, True, True
    )
    for name, (plan, options) in FITTED.items()
    for form in MEASURED
    if form.is_rotated
    for order in ORDERS[:1]
}  # fmt: skip


def to_family(
    call: Call, has_lse: bool = True
) -> tuple[AttentionCall, Tensor, Tensor | None]:
    """Return a call as a kernel family takes it, its output and its log-sum-exp, full of NaN."""
    given = call.arguments
    tokens, heads, head_size = call.query.shape
    out = torch.full_like(call.query, torch.nan)
    lse = torch.full((heads, tokens), torch.nan, device=out.device) if has_lse else None
    names = (
        "query", "key_cache", "value_cache", "block_table", "query_start_loc", "seq_lens",
        "max_query_len", "max_seq_len",
    )  # fmt: skip
    scale = given.get("scale") or head_size**-0.5
    options = pack_options(**given)["options"]
    made = AttentionCall(*(given[name] for name in names), scale, out, lse, options)
    return made, out, lse


def check(case: CodedCase, patch: pytest.MonkeyPatch) -> None:
    """Compute a case by the kernels for Hopper, and compare each row with its error budget.

    Raises:
        AssertionError: a row is not within its budget, or another kernel computed it.
    """
    needles = [(req, keys - 1) for req, keys in enumerate(case.plan.kv_lens)]
    plan = replace(case.plan, seed=7)
    call = paged_call(plan, torch.device("cpu"), needles, **case.options)
    call = coded_call(call, case.form, plan.seed, case.order)
    # a log-sum-exp needs keys that are exact
    patch.setattr(code_prefill, "ROUNDED_SCALE", 0.0)
    if case.is_alone:
        of_family, out, lse = to_family(call)
        with pretend_fp8_hopper(patch):
            code_prefill.plan(of_family).launch_prefill(of_family, 0)
        call.assert_right(out, lse, load_implementation("reference"))
        return
    with pretend_fp8_hopper(patch) as launches:
        # few decodes have a portable kernel
        patch.setattr(CodeDecodePlan, "is_few", lambda *_: False)
        out, lse = call.run(load_implementation("optimized"))
    if case.is_prefill:
        assert launches.made[-2:] == ["upcast_kernel", "prefill_kernel"]
    else:
        assert launches.made == ["code_decode_kernel"]
    call.assert_right(out, lse, load_implementation("reference"))
