"""Caches with a scale per token and head on the kernels for Hopper, interpreted."""

from pathlib import Path

import pytest
import torch
from kernel_faults import Fault, changed_kernels
from pagetwin.conformance.checks.coded_caches import APART, PAGES
from support.hopper_codes import CASES, MEASURED, check

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
    ),
]


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_within_its_error_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(CASES[name], monkeypatch)


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
        "VEC: gl.constexpr = words_at_once(4, config.ALIGNMENT, True)",
        "VEC: gl.constexpr = 4",
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
        "prefill, 128 keys without a mask",
        "budget",
    ),
    "values of a prefill are not scaled": Fault(
        "sm90/code_prefill/kernel.py",
        "numbers = numbers * of_slot[:, None]",
        "numbers = numbers * 1.0",
        "prefill, 128 keys without a mask",
        "budget",
    ),
    "neighbours of a prefill are not subtracted": Fault(
        "sm90/code_prefill/rotation.py",
        "(low - high)",
        "(low + high)",
        "prefill, 128 keys without a mask",
        "budget",
    ),
    "levels of a prefill have half of their zero point": Fault(
        "sm90/code_prefill/rotation.py",
        "2.0 * zero_point",
        "zero_point",
        "prefill, 128 keys without a mask",
        "budget",
    ),
    "elements of other rotations of a prefill are added": Fault(
        "sm90/code_prefill/rotation.py",
        "if CHANNELS < SIZE:",
        "if CHANNELS < 0:",
        "prefill, head size 80",
        "budget",
    ),
    "a fitted query has the divisor of no row": Fault(
        "sm90/prefill/fitting.py",
        "return gl.exp2(exponent)",
        "return gl.exp2(exponent * 0.0)",
        "prefill, 128 keys without a mask",
        "budget",
    ),
    "fitted queries are not fenced": Fault(
        "sm90/prefill/fitting.py",
        "    fence_async_shared()\n",
        "",
        "prefill, 128 keys without a mask",
        "fence",
    ),
    "queries are fitted before they are loaded": Fault(
        "sm90/prefill/fitting.py",
        "    shared.q_pipe.consumer_wait(q_state)\n",
        "",
        "prefill, 128 keys without a mask",
        "",
    ),
    "outputs of fitted queries are stored as float16": Fault(
        "sm90/prefill/epilogue.py",
        "acc[i].to(dtype).to(part.dtype, bitcast=True)",
        "acc[i].to(part.dtype)",
        "prefill, head size 128, fitted",
        "budget",
    ),
    "the last columns of a query are not fitted": Fault(
        "sm90/prefill/fitting.py",
        "config.KEY_DIM // BOX_COLUMNS",
        "1",
        "prefill, 128 keys without a mask",
        "budget",
    ),
    "heads of a prefill share the factors of the first": Fault(
        "sm90/prefill/consumer.py",
        "first_key += kv_head.to(gl.int64) * output.factor_stride_head",
        "first_key += kv_head.to(gl.int64) * 0",
        "prefill, 128 keys without a mask",
        "budget",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_some_format(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    forms = MEASURED
    if fault.case.startswith("prefill, "):
        forms = [form for form in MEASURED if form.is_rotated]
    order = PAGES[0] if "page" in name else APART
    found = []
    with changed_kernels(tmp_path, fault.old, fault.new, fault.file):
        for form in forms:
            try:
                check(CASES[f"{form.name}, {order}, {fault.case}"], monkeypatch)
            except AssertionError as error:
                found.append(str(error))
    assert any(fault.report in text for text in found), found
