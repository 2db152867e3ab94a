"""Decodes from caches with a scale per token and head by the kernel for Hopper, interpreted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_faults import Fault, changed_kernels
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.options import paged_call
from pagetwin.conformance.checks.coded_caches import APART, CODED, PAGES, coded_call
from pagetwin.contract.cache_formats import CacheFormat
from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.kernels.sm90.code_decode.family import CodeDecodePlan
from support.hopper_fp8 import pretend_fp8_hopper

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
MEASURED = [form for form in CODED if form.is_measured]
ORDERS = (APART, *PAGES)
RAGGED = (1, 4, 0, 2, 1), (50, 400, 40, 131, 300)
PLANS = {
    "ragged": BatchPlan(*RAGGED, head_size=64, group=4, dtype=BF16, padding=2),
    "head size 128": BatchPlan(
        (1, 2), (261, 70), head_size=128, group=4, dtype=BF16, block_size=48
    ),
    "float16, a group of 16": BatchPlan(
        (1, 1), (17, 300), head_size=64, group=16, dtype=FP16, kv_heads=1
    ),
    "many segments": BatchPlan((1, 1), (901, 800), head_size=64, group=4, dtype=BF16),
}
OF_EIGHT_BITS = [form for form in MEASURED if form.codes_per_element == 1]
PREFILLS: dict[str, tuple[BatchPlan, dict[str, Any]]] = {
    "ragged": (
        BatchPlan((1, 70, 4), (300, 336, 40), head_size=64, group=4, dtype=BF16),
        {},
    ),
    "128 keys without a mask": (
        BatchPlan((40, 1, 50), (140, 70, 300), head_size=128, group=4, dtype=BF16),
        {},
    ),
    "head size 80": (
        BatchPlan((70, 40), (170, 300), head_size=80, group=4, dtype=FP16),
        {},
    ),
    "a window, float16": (
        BatchPlan((5, 66), (200, 331), head_size=128, group=4, dtype=FP16),
        {"sliding_window": 100},
    ),
    "a cap": (
        BatchPlan((40, 1), (290, 70), head_size=128, group=4, dtype=BF16),
        {"logits_soft_cap": 20.0},
    ),
}


def run(
    plan: BatchPlan,
    form: CacheFormat,
    order: str,
    patch: pytest.MonkeyPatch,
    is_prefill: bool = False,
    **options: Any,
) -> None:
    needles = [(req, keys - 1) for req, keys in enumerate(plan.kv_lens)]
    call = paged_call(replace(plan, seed=7), torch.device("cpu"), needles, **options)
    call = coded_call(call, form, 7, order)
    with pretend_fp8_hopper(patch) as launches:
        # few decodes have a portable kernel
        patch.setattr(CodeDecodePlan, "is_few", lambda *_: False)
        out, lse = call.run(load_implementation("optimized"))
    if is_prefill:
        assert launches.made[-2:] == ["upcast_kernel", "prefill_kernel"]
    else:
        assert launches.made == ["code_decode_kernel"]
    call.assert_right(out, lse, load_implementation("reference"))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("form", MEASURED, ids=lambda form: form.name)
def test_every_row_is_within_its_error_budget(
    form: CacheFormat, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(PLANS[name], form, APART, monkeypatch)


@pytest.mark.parametrize("order", PAGES)
@pytest.mark.parametrize("form", MEASURED, ids=lambda form: form.name)
def test_rows_of_pages_begin_at_multiples_of_four_bytes(
    form: CacheFormat, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ragged", "head size 128"):
        run(PLANS[name], form, order, monkeypatch)


@pytest.mark.parametrize("form", MEASURED, ids=lambda form: form.name)
def test_windows_caps_and_sinks(
    form: CacheFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sliding_window": 90, "logits_soft_cap": 20.0}
    run(PLANS["ragged"], form, APART, monkeypatch, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("form", OF_EIGHT_BITS, ids=lambda form: form.name)
def test_prefills_multiply_scores_by_the_scale_of_each_key(
    form: CacheFormat, name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, options = PREFILLS[name]
    run(plan, form, order, monkeypatch, True, **options)


DECODE = "sm90/code_decode"
FAULTS = {
    "keys have the scales of values": Fault(
        f"{DECODE}/tile.py",
        "k_scale = load_scales(of_k, s_blocks, next_n",
        "k_scale = load_scales(of_v, s_blocks, next_n",
        "many segments",
        "budget",
    ),
    "scales are those of the blocks before": Fault(
        f"{DECODE}/tile.py",
        "load_scale_blocks(of_k, next_n + BLOCK_N,",
        "load_scale_blocks(of_k, next_n,",
        "many segments",
        "budget",
    ),
    "values have the zero points of other rows": Fault(
        f"{DECODE}/words.py",
        "row // 2 * 8 + row % 2 + lane % 4 * 2",
        "row // 2 * 8 + row % 2 + lane % 4",
        "ragged",
        "budget",
    ),
    "a sum is not rescaled to a larger scale": Fault(
        f"{DECODE}/tile.py",
        "alpha = before * inverse",
        "alpha = alpha * inverse",
        "many segments",
        "budget",
    ),
    "warps are joined as if all had one scale": Fault(
        f"{DECODE}/tile.py", "weight *= n_i", "weight *= 1.0", "ragged", "budget"
    ),
    "a level is 127 more than its code": Fault(
        f"{DECODE}/tile.py", "q_sum * 128.0", "q_sum * 127.0", "ragged", "budget"
    ),
    "queries of upper codes are not divided": Fault(
        f"{DECODE}/queries.py", "1.0, 0.0625", "1.0, 1.0", "ragged", "budget"
    ),
    "results are rotated back without the signs": Fault(
        f"{DECODE}/rotation.py",
        "(_signs(channel, D) * (1.0 / D))[:, None]",
        "(1.0 / D)",
        "ragged",
        "budget",
    ),
    "words of a page's keys are numbered as aligned ones": Fault(
        f"{DECODE}/queries.py",
        "VEC: gl.constexpr = words_at_once(min(4, D // 16), config.ALIGNMENT, True)",
        "VEC: gl.constexpr = min(4, D // 16)",
        "ragged",
        "budget",
    ),
    "columns of a page's values are ordered as aligned ones": Fault(
        f"{DECODE}/words.py",
        "VEC: gl.constexpr = words_at_once(SIZE, config.ALIGNMENT, False)\n    # words",
        "VEC: gl.constexpr = SIZE\n    # words",
        "ragged",
        "budget",
    ),
    "all tiles of a prefill have the factors of the first": Fault(
        "sm90/common/score.py",
        "factors + kv_tile * BLOCK_N",
        "factors + kv_tile * 0",
        "128 keys without a mask",
        "budget",
    ),
    "values of a prefill are not scaled": Fault(
        "sm90/code_prefill/kernel.py",
        "numbers = numbers * of_slot[:, None]",
        "numbers = numbers * 1.0",
        "128 keys without a mask",
        "budget",
    ),
    "heads of a prefill share the factors of the first": Fault(
        "sm90/prefill/consumer.py",
        "first_key += kv_head.to(gl.int64) * output.factor_stride_head",
        "first_key += kv_head.to(gl.int64) * 0",
        "128 keys without a mask",
        "budget",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_some_format(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    is_prefill = fault.case in PREFILLS and fault.case not in PLANS
    plan = PREFILLS[fault.case][0] if is_prefill else PLANS[fault.case]
    order = PAGES[0] if "page" in name else APART
    found = []
    with changed_kernels(tmp_path, fault.old, fault.new, fault.file):
        for form in OF_EIGHT_BITS if is_prefill else MEASURED:
            try:
                run(plan, form, order, monkeypatch, is_prefill)
            except AssertionError as error:
                found.append(str(error))
    assert any(fault.report in text for text in found), found
