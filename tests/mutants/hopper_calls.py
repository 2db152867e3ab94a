"""Calls that mutants of the kernels for Hopper are tried with: those that the tests interpret."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import hopper
import hopper_fp8
import pytest
import test_captured_lengths_sm90 as captured_tests
import test_fp8_sm90_interpreted as fp8_tests
import test_sm90_interpreted as sm90_tests
from conftest import TWINS
from pagetwin.conformance.generators.batches import BatchPlan


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


def _run_test(test: Callable[..., None], *arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test(*arguments, monkeypatch=patch)


def _check(pretend: Any, check: Any, case: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, pretend(patch):
        check(case, TWINS["reference"])


CALLS = {
    name: Call(
        case.family,
        size_of(case.plan),
        partial(_check, hopper.pretend_hopper, hopper.check, case),
    )
    for name, case in hopper.CASES.items()
} | {
    f"FP8, {name}": Call(
        "fp8_prefill" if case.is_prefill else "fp8_decode",
        size_of(case.plan),
        partial(_check, hopper_fp8.pretend_fp8_hopper, hopper_fp8.check, case),
    )
    for name, case in hopper_fp8.CASES.items()
}
# tests of the FP8 kernels that compare one call with another
_HAS_FAR = fp8_tests.test_offsets_of_more_than_32_bits_change_no_bit
_E4M3 = hopper_fp8.E4M3
for _family, _test, *_arguments in (
    ("fp8_decode", fp8_tests.test_queries_without_keys_get_0_and_lse_minus_infinity),
    ("fp8_decode", fp8_tests.test_a_call_without_a_log_sum_exp_has_the_same_output),
    ("fp8_decode", fp8_tests.test_an_fp8_output_is_the_float32_output_rounded_once, _E4M3),
    ("fp8_decode", fp8_tests.test_a_block_table_with_a_stride_of_columns_changes_no_bit),
    ("fp8_prefill", fp8_tests.test_a_cache_with_a_stride_of_elements_is_converted_alike),
    *(
        ("fp8_prefill" if "prefill" in case else "fp8_decode", _HAS_FAR, axis, case)
        for axis, case in fp8_tests.FAR
    ),
):  # fmt: skip
    _words = _test.__name__.removeprefix("test_").replace("_", " ")
    CALLS[", ".join(["FP8", _words, *map(str, _arguments)])] = Call(
        _family, 1 << 20, partial(_run_test, _test, *_arguments)
    )
for _axis, _case in sm90_tests.FAR:
    _test = sm90_tests.test_offsets_of_more_than_32_bits_change_no_bit
    CALLS[f"offsets of more than 32 bits, {_axis}, {_case}"] = Call(
        hopper.CASES[_case].family, 1 << 20, partial(_run_test, _test, _axis, _case)
    )
CALLS["append, rows past a bound that is too small"] = Call(
    "append",
    1 << 21,
    partial(
        _run_test,
        captured_tests.test_rows_past_a_bound_that_is_too_small_harm_no_other_request,
        TWINS["reference"],
    ),
)
