"""Failing inputs that are tried again in a fresh process before they are reported."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pagetwin.conformance import Status, check_implementation
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running import again
from pagetwin.conformance.running.again import MOST, try_symptoms_again, words_of
from pagetwin.conformance.running.worker import Job

SLOTS = "every new token gets the slot of its block table row"
FAILED = Result(
    "a law", "area", Status.BROKEN, case="1", what="slots", where="at [0]", found="3", right="4"
)  # fmt: skip
HELD = replace(FAILED, status=Status.HELD, what="", case="")
COUNTING = """
from pagetwin.reference.cache.slot_mapping import compute_slot_mapping_batch as right
calls = []

def compute_slot_mapping_batch(*arguments):
    calls.append(1)
    return right(*arguments) + (len(calls) > 40)
"""
"""Slots that are wrong from the 41st call of a process on."""


class ToldWorker:
    """A worker with one result for each law."""

    def __init__(self, answer: Callable[[Job], Result]) -> None:
        self.answer = answer
        self.jobs: list[Job] = []
        self.events: list[str] = []
        self.deadline = math.inf

    def stop(self) -> None:
        """Note that the process is ended."""
        self.events.append("stop")

    def try_law(self, job: Job, area: str) -> Result:
        """Return the result of a job."""
        self.jobs.append(job)
        self.events.append(job.law)
        return self.answer(job)


def try_again(
    results: list[Result], answer: Callable[[Job], Result], seconds: float = 60.0
) -> tuple[list[str], ToldWorker]:
    """Return what is said about each result, and the worker."""
    worker: Any = ToldWorker(answer)
    found = try_symptoms_again(worker, results, seconds)
    assert [replace(judged, details={}) for judged in found] == results
    return [judged.details.get("again", "") for judged in found], worker


def test_an_input_that_fails_alike_is_reported_as_it_is() -> None:
    other = replace(FAILED, found="77", where="at [5]")
    words, worker = try_again([FAILED], lambda job: other)
    assert words == [""]
    assert worker.events == ["stop", "a law", "stop"]
    assert (worker.jobs[0].case, worker.jobs[0].makes_smaller) == ("1", False)


def test_an_input_that_holds_alone_or_fails_otherwise_says_so() -> None:
    words, _ = try_again([FAILED], lambda job: HELD)
    assert words[0].startswith("alone, in a fresh process, this input does not fail")
    outside = replace(HELD, status=Status.OUTSIDE)
    assert "does not fail" in words_of(FAILED, outside, "here")
    for other in (
        replace(FAILED, what="lse"),
        replace(FAILED, status=Status.CRASHED, message="code -11"),
        replace(FAILED, found="nan"),
    ):
        words, _ = try_again([FAILED], lambda job, other=other: other)
        assert f"fails otherwise: {other.status}, {other.summary}" in words[0]


def test_an_input_that_is_not_finished_says_nothing() -> None:
    unfinished = replace(HELD, status=Status.UNFINISHED)
    assert try_again([FAILED], lambda job: unfinished)[0] == [""]


def test_one_input_per_symptom_is_tried_each_in_a_fresh_process() -> None:
    results = [
        FAILED,
        replace(FAILED, law="b law", case="222"),
        replace(FAILED, law="c law", what="lse"),
        replace(HELD, law="d law"),
        replace(FAILED, law="e law", status=Status.CRASHED, message="code 3"),
        replace(FAILED, law="f law", what="rows", case=""),
    ]
    words, worker = try_again(results, lambda job: HELD)
    assert [bool(word) for word in words] == [True, False, True, False, False, False]
    assert worker.events == ["stop", "a law", "stop", "c law", "stop"]


def test_no_more_inputs_are_tried_than_there_is_time_for() -> None:
    results = [
        replace(FAILED, law=f"law {name}", what=f"output {name}")
        for name in "abcdefghij"
    ]
    assert len(try_again(results, lambda job: HELD)[1].jobs) == MOST
    assert not try_again(results, lambda job: HELD, seconds=-1.0)[1].jobs


def test_words_are_in_the_summary_and_in_the_details() -> None:
    result = again.with_words(FAILED, "tried again, it holds")
    assert again.with_words(FAILED, "") is FAILED
    assert result.summary == "slots, at [0]: found 3, right is 4; tried again, it holds"
    page = Report("own", "cpu", (result,)).describe(result)
    assert "note: tried again, it holds" in page
    assert result.symptom == FAILED.symptom


@pytest.mark.extended
def test_a_kernel_that_counts_its_calls_is_reported_with_what_its_input_does_alone(
    write_module: Callable[[str], str],
) -> None:
    """The reported input held when it was run as the report said."""
    name = write_module(COUNTING)
    report = check_implementation(name, SLOTS, examples=60, device="cpu")
    (result,) = report.results
    assert result.status == Status.BROKEN
    words = "alone, in a fresh process, this input does not fail"
    assert words in result.summary and words in report.to_markdown()
