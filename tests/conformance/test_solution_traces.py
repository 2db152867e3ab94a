"""Traces of a solution: the verdict of each workload, and the machine on which it was found."""

import math
from datetime import datetime
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance import Status
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.flashinfer_bench import traces
from pagetwin.conformance.flashinfer_bench.adapter import DTYPE_OF, SHAPE_OF
from pagetwin.conformance.flashinfer_bench.definitions import find_definition
from pagetwin.conformance.flashinfer_bench.families import FAMILIES
from pagetwin.conformance.flashinfer_bench.traces import (
    environment_of,
    evaluation_of,
    judge_workloads,
    status_of,
    with_laws,
)
from pagetwin.conformance.flashinfer_bench.workloads import workloads_of
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.trial import find_law
from pagetwin.conformance.running.worker import Job

NUMBERS = {
    "max_relative_error": 0.25,
    "max_absolute_error": 0.5,
    "latency_ms": 1.0,
    "reference_latency_ms": 2.0,
    "speedup_factor": 3.0,
}


def result(status: Status, **given: Any) -> Result:
    return Result("a law", "attention", status, **given)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (result(Status.HELD), "PASSED"),
        (result(Status.HANGS, message="it took more than 3 seconds"), "TIMEOUT"),
        (result(Status.BROKEN, what="output"), "INCORRECT_NUMERICAL"),
        (result(Status.BROKEN, message="KeyError: q"), "RUNTIME_ERROR"),
        (result(Status.OUT_OF_MEMORY), "RUNTIME_ERROR"),
        (result(Status.KNOWN), "RUNTIME_ERROR"),
        (result(Status.OUTSIDE), "RUNTIME_ERROR"),
        (result(Status.UNFINISHED), "RUNTIME_ERROR"),
        (result(Status.CRASHED), "RUNTIME_ERROR"),
        (result(Status.BROKEN, message=f"ValueError: {SHAPE_OF} o"), "INCORRECT_SHAPE"),
        (result(Status.BROKEN, message=f"TypeError: {DTYPE_OF} o"), "INCORRECT_DTYPE"),
    ],
)
def test_only_a_law_that_holds_has_passed(found: Result, word: str) -> None:
    assert status_of(found) == word


def test_each_operation_of_a_family_has_a_law() -> None:
    assert traces.LAWS.keys() == {family.operation for family in FAMILIES}
    for name in traces.LAWS.values():
        assert find_law(name).name == name


def test_an_evaluation_has_all_numbers_of_what_has_passed() -> None:
    details = {"measured": NUMBERS}
    found = evaluation_of(result(Status.HELD, details=details), "cpu")
    errors = {name: NUMBERS[name] for name in list(NUMBERS)[:2]}
    assert found["correctness"] == errors
    assert found["performance"] == {name: NUMBERS[name] for name in list(NUMBERS)[2:]}
    assert datetime.fromisoformat(found["timestamp"]).tzinfo is not None
    wrong = result(Status.BROKEN, what="lse", where="at [0]", details=details)
    found = evaluation_of(wrong, "cpu")
    assert found["log"] == wrong.summary != "" and found["performance"] is None
    failed = evaluation_of(result(Status.HANGS), "cpu")
    assert failed["correctness"] is failed["performance"] is None
    infinite = {"measured": NUMBERS | {"max_relative_error": math.inf}}
    found = evaluation_of(result(Status.HELD, details=infinite), "cpu")
    assert found["correctness"]["max_relative_error"] == "Infinity"
    nan = {"measured": NUMBERS | {"max_absolute_error": math.nan}}
    found = evaluation_of(result(Status.BROKEN, what="lse", details=nan), "cpu")
    assert math.isnan(found["correctness"]["max_absolute_error"])


def test_what_the_laws_say_is_added_to_each_log_alone() -> None:
    broken = result(Status.BROKEN, what="lse", where="at [0]", found="1", right="2")
    given = [
        {"definition": "own", "evaluation": {"log": "words", "status": "PASSED"}},
    ]
    (found,) = with_laws(given, Report("own", "cpu", (broken, result(Status.HELD))))
    assert given[0]["evaluation"] == {"log": "words", "status": "PASSED"}
    assert found["definition"] == "own" and found["evaluation"]["status"] == "PASSED"
    words, counts, symptom = found["evaluation"]["log"].split("\n")
    assert words == "words"
    assert counts.startswith("laws of pagetwin: ")
    assert "1 broken" in counts and "1 held" in counts
    assert symptom.endswith(f": a law: {broken.summary}")


def test_each_workload_is_one_measured_case_of_its_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[Job] = []

    def try_law(job: Job, area: str) -> Result:
        jobs.append(job)
        return result(Status.HELD, details={"measured": NUMBERS})

    worker = SimpleNamespace(try_law=try_law, stop=lambda: None)
    monkeypatch.setattr(traces, "Worker", lambda *given: worker)
    definition = find_definition("gqa_paged_decode_h4_kv2_d16_ps16")
    workloads = workloads_of(definition)
    latencies = [0.5] * len(workloads)

    def time_reference(*given: Any) -> float:
        assert not jobs
        return latencies.pop()

    monkeypatch.setattr(traces, "time_reference", time_reference)
    solution: Any = SimpleNamespace(file="own.json", name="own", definition=definition)
    found = judge_workloads(solution, "cpu", 3.0)
    assert [job.case for job in jobs] == [repr(workload.plan) for workload in workloads]
    law = traces.LAWS["paged_attention"]
    assert all(job.is_measured and job.law == law for job in jobs)
    assert not latencies and len(found) == len(workloads)
    # the reference was slower beside the solution
    for trace in found:
        assert trace["evaluation"]["performance"]["reference_latency_ms"] == 0.5
        assert trace["evaluation"]["performance"]["speedup_factor"] == 0.5


@pytest.mark.parametrize("fails", [False, True])
def test_each_workload_has_its_time_limit_and_the_worker_ends(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    given: list[Any] = []
    ends: list[int] = []

    def try_law(job: Any, area: str) -> Result:
        if fails:
            raise KeyboardInterrupt
        return result(Status.HANGS)

    def make(*args: Any) -> Any:
        given.append(args)
        return SimpleNamespace(try_law=try_law, stop=lambda: ends.append(1))

    workloads = [SimpleNamespace(plan=number) for number in range(3)]
    monkeypatch.setattr(traces, "Worker", make)
    monkeypatch.setattr(traces, "workloads_of", lambda definition: workloads)
    monkeypatch.setattr(traces, "trace_of", lambda workload, *given: workload.plan)
    monkeypatch.setattr(traces, "_baseline_of", lambda *given: {})
    family = SimpleNamespace(operation="merge_attn_states")
    solution: Any = SimpleNamespace(
        file="own.json", name="own", definition=SimpleNamespace(family=family)
    )
    if fails:
        with pytest.raises(KeyboardInterrupt):
            judge_workloads(solution, "cpu", 3.0)
    else:
        assert judge_workloads(solution, "cpu", 3.0) == [0, 1, 2]
    assert ends == [1]
    assert given == [("own.json", "cpu", traces.SECONDS_OF_A_LAW, 3.0)]


def test_the_machine_and_its_libraries_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == "triton":
            raise PackageNotFoundError
        return f"{name} 1"

    monkeypatch.setattr(traces.importlib.metadata, "version", version)
    monkeypatch.setattr(traces.platform, "machine", lambda: "a machine")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    found = environment_of("cpu")
    libraries = {name: f"{name} 1" for name in ("pagetwin", "torch", "numpy")}
    assert found["hardware"] == "a machine"
    assert found["libs"].items() >= (libraries | {"cuda": "12.9"}).items()
    assert "triton" not in found["libs"]
    assert environment_of("cuda:1")["hardware"] == "card cuda:1"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "cuda" not in environment_of("cpu")["libs"]
