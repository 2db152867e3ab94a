"""Kernels whose results do not come from the inputs of their calls are found, each by its symptom.

`cheats/kinds.py` has one function per kind. They are tried as adapters, as solutions in the format
of FlashInfer-Bench, and by `pagetwin fuzz`.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cheats.kinds import KINDS
from pagetwin.conformance import check_implementation
from pagetwin.conformance.api.fuzz import fuzz_implementation
from pagetwin.conformance.flashinfer_bench.definitions import find_definition
from pagetwin.conformance.flashinfer_bench.export import reference_solution
from pagetwin.conformance.flashinfer_bench.solutions import read_solution
from pagetwin.conformance.flashinfer_bench.traces import judge_workloads
from pagetwin.conformance.reports.report import Report

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("guarded_calls"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
    ),
]

FOLDER = Path(__file__).with_name("cheats")
DECODE = "gqa_paged_decode_h4_kv2_d16_ps16"
ADAPTER = """
import sys
from functools import wraps

sys.path.insert(0, {folder!r})
import kinds
from honest import SUPPORT, attend

paged_attention = wraps(attend)({kind})
"""
SOLUTION = """
from . import kinds
{reference}

run = kinds.{kind}(run)
"""
SYMPTOMS = {
    "last_output": "differs from the one before|changed",
    "same_objects": "changed",
    "same_addresses": "differs from the one before|changed",
    "sum_of_queries": "differs from the one before|changed",
    "untouched_output": "result of other contents|held other numbers",
    "calls_reference": "it called paged_attention of the suite",
    "reads_caller": r"it called sys\._getframe",
    "searches_memory": r"it called gc\.get_objects",
    "detects_suite": r"it called sys\._getframe",
    "counts_calls": "equal calls|changed|output",
    "writes_inputs": "which is only read",
    "replaces_comparator": r"it replaced .*\.expect_right",
    "replaces_clock": r"it replaced time\.perf_counter",
    "lazy_result": "Later",
    "after_return": "output",
    "stale_plan": "one key shorter in place|nan",
    "stale_scale": "with another scale of the same tensors",
    "static_output": "result of the first call after a second one",
    "versions": "in place",
    "last_requests": "at token",
    "changes_defaults": r"it replaced .*\.judge_rows\.__kwdefaults__",
    "changes_constants": r"it replaced .*\.(FACTOR|ROUNDINGS_INSIDE)",
    "changes_verdict": r"it replaced .*\.Verdict\.ok",
    "copies_reference": "it loaded a copy of paged_attention",
    "leaves_modes": "it left .* changed",
    "profiles_judge": r"it called sys\.setprofile",
    "reads_traceback": "it read tb_frame",
    "asks_logging": r"it called sys\._getframe",
    "rejects_cases": "it raised UnsatisfiedAssumption",
    "raises_outside": "it raised OutsideSupport",
    "repoints_output": r"it gave (out|argument \d+) other memory",
    "own_methods": "it gave .* its own cpu",
    "hides_builtin": r"it replaced .*\.budgets\.float",
    "knows_factors": "differs from the one before|changed|output",
}
"""What a report says of each kind."""
FUZZED = ("last_output", "stale_plan")
"""Kinds that `make test-long` tries with `pagetwin fuzz`, a minute or two each. The others are for
`pytest -m slow tests/conformance/test_cheats.py`."""
SOLVED = ("same_objects", "counts_calls", "replaces_comparator", "after_return")
"""Kinds that `make test-long` tries as solutions, and the others but for ALIKE as adapters. All of
them in each form are for `pytest -m slow`, too."""
ALIKE = (
    *("same_addresses", "sum_of_queries", "reads_caller", "asks_logging"),
    *("replaces_clock", "changes_defaults", "changes_constants", "raises_outside"),
    *("stale_plan", "last_output"),
)
"""Kinds whose symptom another kind has, or that `make test-long` tries in another form: for
`pytest -m slow` alone."""
TIMED = (
    *("last_output", "same_objects", "same_addresses", "sum_of_queries"),
    *("counts_calls", "after_return", "knows_factors", "fp8_later", "slows_reference"),
)
"""Kinds that a latency must not be stated of, whatever the laws say."""
TIMED_ALWAYS = ("last_output", "same_addresses", "counts_calls", "fp8_later")
"""Those of them that `make test-long` tries; the others are for `pytest -m slow`."""
ONLY_TIMED = ("fp8_later", "slows_reference")
"""Kinds of which the laws need not say anything."""
JUDGED = [kind for kind in KINDS if kind not in ONLY_TIMED]
NO_OUTPUT = (
    *("untouched_output", "calls_reference", "copies_reference", "stale_scale"),
    *("static_output", "versions", "last_requests", "repoints_output"),
)
"""Kinds that need arguments which a solution does not have, or larger batches."""
LARGE = ("last_requests",)
"""Kinds that are found in large batches."""


def adapter_of(kind: str | None, folder: Path) -> str:
    """Write the adapter of a kind; if None, the correct one."""
    path = folder / f"cheat_{kind}.py"
    made = (
        "lambda *args, **given: attend(*args, **given)"
        if kind is None
        else f"kinds.{kind}(attend)"
    )
    path.write_text(ADAPTER.format(folder=str(FOLDER), kind=made))
    return str(path)


def solution_of(kind: str | None, folder: Path) -> str:
    """Write a solution of a kind; if None, the correct one."""
    solution = reference_solution(find_definition(DECODE))
    source = solution["sources"][0]
    if kind is not None:
        text = SOLUTION.format(reference=source["content"], kind=kind)
        source["content"] = text
        kinds = (FOLDER / "kinds.py").read_text()
        solution["sources"].append({"path": "kinds.py", "content": kinds})
    path = folder / "solution.json"
    path.write_text(json.dumps(solution))
    return str(path)


def said(report: Report) -> str:
    """Return what a report says of its failures."""
    return "\n".join(
        f"{result.what} {result.where} {result.found} {result.message}"
        for result in report.results
        if not result.ok
    )


def area_of(implementation: str) -> str:
    """Return the area of the laws that find a cheat."""
    is_large = any(kind in implementation for kind in LARGE)
    return "large_batches" if is_large else "repeated_calls"


def check(implementation: str, **options: Any) -> Report:
    area = area_of(implementation)
    return check_implementation(
        implementation, only=area, device="cpu", examples=4, **options
    )


def test_the_page_of_mutants_has_each_kind() -> None:
    page = (FOLDER.parents[2] / "docs" / "mutants.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"| `{kind}` |" not in page] == []


def test_a_correct_adapter_and_a_correct_solution_hold(tmp_path: Path) -> None:
    for file in (adapter_of(None, tmp_path), solution_of(None, tmp_path)):
        report = check(file)
        assert report.ok and any(found.cases for found in report.results)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in SOLVED + ALIKE else ())
        for kind in JUDGED
    ],
)
def test_a_kind_is_found_by_check_with_its_symptom(kind: str, tmp_path: Path) -> None:
    # large batches take more than two seconds on a busy machine
    seconds = 30.0 if kind in LARGE else 2.0
    report = check(adapter_of(kind, tmp_path), seconds_of_a_law=seconds)
    assert not report.ok
    assert re.search(SYMPTOMS[kind], said(report)), said(report)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SOLVED else pytest.mark.slow)
        for kind in JUDGED
        if kind not in NO_OUTPUT
    ],
)
def test_a_kind_is_found_as_a_solution(kind: str, tmp_path: Path) -> None:
    report = check(solution_of(kind, tmp_path), seconds_of_a_law=2.0)
    assert not report.ok
    assert re.search(SYMPTOMS[kind], said(report)), said(report)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        *(
            pytest.param(kind, marks=() if kind in TIMED_ALWAYS else pytest.mark.slow)
            for kind in TIMED
        ),
    ],
)
def test_a_timed_call_computes_its_own_numbers(
    kind: str | None, tmp_path: Path
) -> None:
    solution = read_solution(solution_of(kind, tmp_path))
    traces = judge_workloads(solution, "cpu", seconds_of_a_case=60.0)
    ended = {trace["evaluation"]["status"] for trace in traces}
    assert ended == ({"PASSED"} if kind is None else {"INCORRECT_NUMERICAL"}), traces


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in FUZZED else pytest.mark.slow)
        for kind in JUDGED
    ],
)
def test_a_kind_is_found_by_fuzz(kind: str, tmp_path: Path) -> None:
    adapter = adapter_of(kind, tmp_path)
    run = fuzz_implementation(
        adapter,
        minutes=2.0,
        only=area_of(adapter) if kind in LARGE else None,
        corpus=tmp_path / "corpus",
        device="cpu",
        examples=4,
        cases=64,
    )
    assert run.failures
    assert run.report is not None
    assert re.search(SYMPTOMS[kind], said(run.report)), said(run.report)
