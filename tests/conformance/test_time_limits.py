"""Time limits: a law whose time is over is not finished, which is neither broken nor lost."""

import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pagetwin.conformance import Status, check_implementation
from pagetwin.conformance.api import check as runner
from pagetwin.conformance.api.fuzz import fuzz_implementation
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.trial import (
    SECONDS_TO_SHRINK,
    find_law,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.conformance.running.worker import Job, Worker
from pagetwin.tools import report_files
from pagetwin.tools.cli import app
from pagetwin.tools.command_line import UNFINISHED
from pagetwin.tools.report_files import ReportFiles
from typer.testing import CliRunner

SLOTS = "every new token gets the slot of its block table row"
FEWEST = "blocks needed are the fewest that hold the tokens"
SLOW = """
import time
from pagetwin.conformance import Support
from pagetwin.reference import blocks_needed
from pagetwin.reference import compute_slot_mapping_batch as right

SUPPORT = Support(operations=["blocks_needed", "compute_slot_mapping_batch"])

def compute_slot_mapping_batch(query_lens, computed, rows, block_size):
    time.sleep({seconds})
    return right(query_lens, computed, rows, block_size) + {wrong}
"""
Write = Callable[..., str]


@pytest.fixture
def kernels(write_module: Callable[[str], str]) -> Write:
    """Return a function that writes a slow module and returns its name."""
    return lambda seconds, wrong=0: write_module(
        SLOW.format(seconds=seconds, wrong=wrong)
    )


def try_in_worker(name: str, examples: int = 25, **limits: float) -> Result:
    """Return the result of the law on slots, of a worker that is stopped afterwards."""
    worker = Worker(name, "cpu", **limits)
    try:
        return worker.try_law(Job(SLOTS, examples=examples), "slots")
    finally:
        worker.stop()


def of_law(results: tuple[Result, ...], law: str) -> Result:
    (found,) = [judged for judged in results if judged.law == law]
    return found


@pytest.mark.extended
def test_a_law_whose_time_is_over_says_how_many_cases_held(kernels: Write) -> None:
    result = try_in_worker(kernels(0.2), examples=200, seconds_of_a_law=4)
    assert result.status == Status.UNFINISHED and result.ok
    assert 1 <= result.cases <= 30 and not result.case
    assert result.reason == f"{result.cases} cases held in {result.seconds:g} seconds"


@pytest.mark.extended
def test_a_failure_within_the_time_is_broken_though_no_time_is_left_to_shrink_it(
    kernels: Write,
) -> None:
    name = kernels(0.02, wrong=1)
    result = try_in_worker(name, examples=200, seconds_of_a_law=12)
    assert result.status == Status.BROKEN and result.case
    assert result.seconds < SECONDS_TO_SHRINK / 2


@pytest.mark.extended
def test_a_case_that_takes_longer_than_its_law_may_is_named_and_does_not_hang(
    kernels: Write,
) -> None:
    worker = Worker(kernels(60), "cpu", seconds_of_a_law=1)
    try:
        result = worker.try_law(Job(SLOTS), "slots")
        worker.seconds_of_a_law = 60
        other = worker.try_law(Job(FEWEST), "counting")
    finally:
        worker.stop()
    assert result.status == Status.UNFINISHED and result.cases == 0
    assert "and the next one had not ended" in result.reason
    assert "Step" in result.case or "Slot" in result.case
    assert other.status == Status.HELD


@pytest.mark.extended
def test_a_case_that_exceeds_its_own_limit_hangs_within_the_time_of_its_law(
    kernels: Write,
) -> None:
    result = try_in_worker(kernels(60), seconds_of_a_case=1)
    assert result.status == Status.HANGS and not result.ok


@pytest.mark.extended
def test_after_the_minutes_of_a_check_its_laws_are_not_finished(kernels: Write) -> None:
    report = check_implementation(
        kernels(0.5), only="slot", device="cpu", minutes=2 / 60, workers=2
    )
    found = {judged.status for judged in report.results}
    declared = {"blocks_needed", "compute_slot_mapping_batch"}
    for judged in report.results:
        if not set(find_law(judged.law).needs) <= declared:
            assert judged.status == Status.OUTSIDE, judged
    assert Status.UNFINISHED in found and Status.BROKEN not in found
    assert report.ok and of_law(report.results, SLOTS) in report.unfinished
    assert not json.loads(report.to_json())["is_finished"]
    assert "## Laws that are not finished" in report.to_markdown()
    assert report.to_junit().count("<skipped") >= len(report.unfinished)


@pytest.mark.extended
def test_the_exit_code_says_that_laws_are_not_finished(
    kernels: Write,
) -> None:
    words = ["check", kernels(0.2), "--only", SLOTS, "--law-seconds", "3"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == UNFINISHED, result.output
    assert "not finished: 1 laws" in result.output and "held in" in result.output


@pytest.mark.extended
def test_an_interrupted_check_keeps_the_laws_that_were_judged(
    kernels: Write, tmp_path: Path, monkeypatch: Any
) -> None:
    """The files are written after each law, and the table shows what was judged."""
    written: list[list[str]] = []

    def laws_of_file() -> list[str]:
        found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
        results = found["results"]
        return [
            judged["law"] for judged in results if judged["status"] != "not finished"
        ]

    def hold(worker: Worker, job: Job, area: str) -> Result:
        return Result(job.law, area, Status.HELD, cases=1)

    def interrupt(files: ReportFiles, make: Callable[[], Report]) -> None:
        write_so_far(files, make)
        written.append(laws_of_file())
        if len(written) == 3:
            raise KeyboardInterrupt

    name = kernels(0)
    write_so_far = ReportFiles.write_so_far
    monkeypatch.setattr(report_files, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(runner, "check_needs_no_gpu", lambda worker: None)
    monkeypatch.setattr(Worker, "try_law", hold)
    monkeypatch.setattr(ReportFiles, "write_so_far", interrupt)
    words = ["check", name, "--only", "slot", "--json", "r.json", "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == UNFINISHED, result.output
    assert [len(laws) for laws in written] == [1, 2, 3]
    assert set(written[0]) < set(written[1]) < set(written[2])
    assert laws_of_file() == written[2]
    assert "the check ended before this law" in result.output


@pytest.mark.extended
def test_the_time_of_a_fuzzing_run_keeps_the_batches_that_held(tmp_path: Path) -> None:
    run = fuzz_implementation(
        "reference",
        minutes=2 / 60,
        corpus=tmp_path,
        only="paged attention is right for every batch",
        device="cpu",
        batches=4096,
    )
    assert not run.failures and run.cases > 0
    lines = [
        json.loads(line)
        for file in tmp_path.glob("*/tried.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert sum(tried["cases"] for tried in lines) == run.cases
    assert {tried["status"] for tried in lines} == {"held"}


NARROW = """
import torch
from pagetwin.conformance import Support
from pagetwin.reference import paged_attention as right

SUPPORT = Support(
    operations=["paged_attention"], dtypes=["float32"], head_sizes=[32], group_sizes=[4],
    block_sizes=[16], query_lens=[1], options=["scale"], rejects=[],
)


def paged_attention(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, max_query_len,
    max_seq_len, scale=None,
):
    tensors = query, key_cache, value_cache, block_table, query_start_loc, seq_lens
    return right(*tensors, max_query_len, max_seq_len, scale=scale) + 1
"""


@pytest.mark.extended
@pytest.mark.parametrize("seconds", [60.0, 0.001])
def test_the_smallest_input_of_a_kernel_is_one_that_it_declares(
    tmp_path: Path, seconds: float
) -> None:
    """The input showed sizes that the kernel does not take, and that were fitted for the call.

    If no time was left to make it smaller, Hypothesis took the failure for one that did not come
    back: a case outside of the support was not fitted when it was tried again.
    """
    file = tmp_path / "narrow.py"
    file.write_text(NARROW, encoding="utf-8")
    setting = make_setting(load_candidate(str(file)), "cpu")
    law = find_law("every new token attends to its sequence up to itself")
    result = try_law(law, setting, 0, 20, seconds=seconds)
    assert result.status == Status.BROKEN and not result.message
    plan = make_case(law, result.case)
    assert (plan.head_size, plan.group, plan.block_size) == (32, 4, 16)
    assert set(plan.query_lens) <= {1} and result.where.startswith("at token")


# failures whose input is being made smaller when the time is over


LATER_SLOW = """
import time
from functools import wraps
from pagetwin.conformance import Support
from pagetwin.reference import {operation} as right

floats = ["float32"]
SUPPORT = Support(
    operations=["{operation}"], dtypes=floats, cache_dtypes=floats, options=["scale"]
)
wrong = 0

@wraps(right)
def {operation}(*args, **given):
    global wrong
    found = right(*args, **given)
    if wrong == {wrong}:
        time.sleep(60)
    wrong += 1
    return found + 1
"""
"""Wrong for every input. After some calls each one takes a minute."""


@pytest.mark.extended
def test_a_failure_is_reported_as_it_is_if_its_smaller_input_does_not_end_in_time(
    write_module: Write,
) -> None:
    """The law was not finished, and its failure was lost."""
    name = write_module(
        LATER_SLOW.format(operation="compute_slot_mapping_batch", wrong=1)
    )
    result = try_in_worker(name, examples=50, seconds_of_a_law=3)
    assert result.status == Status.BROKEN and result.case and result.what
    assert result.reason == "the time was over before a smaller input was found"
    assert result.cases == 1 and 3 <= result.seconds < 20


@pytest.mark.extended
def test_a_fuzzing_run_keeps_a_failure_that_is_being_made_smaller(
    write_module: Write, tmp_path: Path
) -> None:
    """The batch is wrong in its group, and for the law alone; then the run ends."""
    law = "paged attention is right for every batch of a signature"
    # 32 batches, and the first one again
    name = write_module(LATER_SLOW.format(operation="paged_attention", wrong=33))
    run = fuzz_implementation(
        name, 4 / 60, tmp_path, only=law, device="cpu", batches=32, cases=32
    )
    (failure,) = run.failures
    assert failure.status == Status.BROKEN and failure.case.startswith("SignedBatch(")
    assert failure.reason == "the time was over before a smaller input was found"
    assert run.cases == 32 and len(run.programs) == 1
    (line,) = run.summary["values"]["operation"].items()
    assert line == ("paged_attention", 32)


# a case that exceeds its limit once, as under load


SLOW_ONCE = """
import time
from pathlib import Path
from pagetwin.conformance import Support
from pagetwin.reference import blocks_needed
from pagetwin.reference import compute_slot_mapping_batch as right

SUPPORT = Support(operations=["blocks_needed", "compute_slot_mapping_batch"])
calls = 0

def compute_slot_mapping_batch(query_lens, computed, rows, block_size):
    global calls
    calls += 1
    if calls == {call} and len(list(Path().glob("slept*"))) < {times}:
        Path(f"slept{{time.time()}}").touch()
        time.sleep(60)
    return right(query_lens, computed, rows, block_size)

def blocks_needed(*args, **given):
    return 7
"""
"""A call of a process sleeps, in the first processes. The other operation is wrong."""
ONCE = "a case took more than 8 seconds, but not when it was tried again"


@pytest.mark.long
def test_a_case_that_is_slow_once_is_not_the_first_symptom_of_a_report(
    write_module: Write,
) -> None:
    name = write_module(SLOW_ONCE.format(call=5, times=1))
    words = ["check", name, "--only", "s", "--device", "cpu", "--examples", "5"]
    words += ["--case-seconds", "8", "--markdown", "r.md", "--json", "r.json"]
    result = CliRunner().invoke(app, words)
    found = json.loads(Path("r.json").read_text(encoding="utf-8"))
    statuses = {result["status"] for result in found["results"]}
    assert "broken" in statuses and "hangs" not in statuses
    assert found["severities"][0] != "ends the process"
    assert "notes: 1" in result.output and ONCE in result.output
    text = Path("r.md").read_text(encoding="utf-8")
    assert "## Notes" in text and ONCE in text


# a process that takes long to end


@pytest.mark.extended
def test_a_process_that_ends_slowly_has_crashed_and_does_not_hang() -> None:
    """Under load a crash was reported as a hang of more than 120 seconds after 2 seconds."""
    worker = Worker("none", "cpu")
    worker._lines = queue.SimpleQueue()
    worker._lines.put(None)  # its output has ended
    worker._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
    words = "import time; time.sleep(3); raise SystemExit(7)"
    worker._process = subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, text=True
    )
    try:
        assert worker._next(time.monotonic() + 60) is None
        ended = worker._ended(120)
    finally:
        worker.stop()
    assert ended == (Status.CRASHED, "the process ended with code 7")
