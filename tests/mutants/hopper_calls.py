"""Calls that mutants of the kernels for Hopper are tried with: those that the tests interpret."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from pagetwin.conformance.cases.batches import BatchPlan
from support import (
    hopper,
    hopper_checks,
    hopper_codes,
    hopper_fp8,
    hopper_fp8_checks,
)
from support.twins import TWINS


class Call(NamedTuple):
    """A call of a kernel, and the check of its result.

    Args:
        family: the folder of the kernel in `kernels/sm90`, or "prefill".
        size: pairs of a query and a key, over all heads, times the elements of a head.
        check: makes the call, and raises if its result is wrong.
    """

    family: str
    size: int
    check: Callable[[], None]


def size_of(plan: BatchPlan) -> int:
    """Return how large a batch is, which is about how long the interpreter takes."""
    pairs = sum(
        new * keys for new, keys in zip(plan.query_lens, plan.kv_lens, strict=True)
    )
    return pairs * plan.kv_heads * plan.group * plan.head_size


def _run_check(check: Callable[..., None], *arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check(*arguments, monkeypatch=patch)


def _check(pretend: Any, check: Any, case: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, pretend(patch):
        check(case, TWINS["reference"])


def _run_codes(case: hopper_codes.CodedCase) -> None:
    with pytest.MonkeyPatch.context() as patch:
        hopper_codes.check(case, patch)


CALLS = {
    name: Call(
        case.family,
        size_of(case.plan),
        partial(_check, hopper.pretend_hopper, hopper.check, case),
    )
    for name, case in hopper.CASES.items()
} | {
    f"FP8, {name}": Call(
        "code_prefill" if case.is_prefill else "code_decode",
        size_of(case.plan),
        partial(_check, hopper_fp8.pretend_fp8_hopper, hopper_fp8.check, case),
    )
    for name, case in hopper_fp8.CASES.items()
}
for _name, _coded in hopper_codes.CASES.items():
    CALLS[f"codes, {_name}"] = Call(
        "code_prefill" if _coded.is_prefill else "code_decode",
        size_of(_coded.plan),
        partial(_run_codes, _coded),
    )
for _words, _check_calls in hopper_fp8_checks.CHECKS.items():
    _is_prefill = "prefill" in _words or "converted alike" in _words
    if str(hopper_fp8.E5M2) not in _words:
        CALLS[f"FP8, {_words}"] = Call(
            "code_prefill" if _is_prefill else "code_decode",
            1 << 20,
            partial(_run_check, _check_calls),
        )
for _axis, _case in hopper_checks.FAR:
    CALLS[f"offsets of more than 32 bits, {_axis}, {_case}"] = Call(
        hopper.CASES[_case].family,
        1 << 20,
        partial(_run_check, hopper_checks.check_far, _axis, _case),
    )
CALLS["append, rows past a bound that is too small"] = Call(
    "append",
    1 << 21,
    partial(_run_check, hopper_checks.check_rows_past_a_bound, TWINS["reference"]),
)
