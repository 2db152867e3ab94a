"""The worker: what it concludes from the results and the ends of its process."""

import io
import math
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.running import worker as module
from pagetwin.conformance.running.worker import (
    Job,
    Worker,
    _ignore_broken_pipe,
    _line_of_kernel,
)

JOB = Job("a law")
SIGNED = Job("a law", 0, 64, signature=3)


class Scripted(Worker):
    """A worker whose jobs have the results of a list."""

    def __init__(self, results: Sequence[Result], device: str = "cpu") -> None:
        super().__init__("scripted", device, gpu=None if device == "cpu" else "0")
        self.results, self.jobs = list(results), []
        self.stops = 0
        self._calls = 5

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Count the processes that are ended."""
        self.stops += 1

    def _try(self, job: Job, area: str) -> Result:
        self.jobs.append(job)
        return self.results.pop(0)


def result(status: Status, case: str = "x", **given: Any) -> Result:
    """Return a result of a law that tried nine cases in a second."""
    return Result(
        "a law", "area", status, **{"cases": 9, "seconds": 1.0, "case": case} | given
    )


HELD = result(Status.HELD, "")


def tried(
    results: Sequence[Result], job: Job = JOB, device: str = "cpu"
) -> tuple[Result, Scripted]:
    """Return the result of a job of a scripted worker, which has used all results."""
    worker = Scripted(results, device)
    found = worker.try_law(job, "area")
    assert not worker.results
    return found, worker


def test_a_result_that_is_not_fatal_is_returned() -> None:
    for status in (Status.HELD, Status.BROKEN, Status.UNFINISHED, Status.OUTSIDE):
        own = result(status)
        assert tried([own])[0] is own


def test_a_known_result_needs_no_process() -> None:
    worker = Scripted([HELD])
    worker.known = {"a law": result(Status.MISSING)}
    assert worker.try_law(JOB, "area").status == Status.MISSING
    probe = replace(JOB, probe={"dtypes": ["float32"]})
    assert worker.try_law(probe, "area") is HELD


def test_no_law_begins_after_the_deadline() -> None:
    worker = Scripted([])
    worker.deadline = 0.0
    found = worker.try_law(JOB, "area")
    assert found.status == Status.UNFINISHED and "before its first case" in found.reason


def test_a_fatal_input_that_fails_alone_is_the_failure() -> None:
    crash = result(Status.CRASHED, message="code -11")
    alone = result(Status.CRASHED, message="code -6", cases=1)
    found, worker = tried([crash, alone])
    assert (found.message, found.cases, found.seconds) == ("code -6", 9, 2.0)
    assert worker.jobs == [JOB, replace(JOB, case="x")]


def test_an_input_that_breaks_the_law_alone_is_broken() -> None:
    found, _ = tried([result(Status.CRASHED), result(Status.BROKEN, what="slots")])
    assert (found.status, found.what) == (Status.BROKEN, "slots")


def test_a_fatal_input_that_holds_alone_says_so() -> None:
    found, worker = tried([result(Status.CRASHED, message="code -11"), HELD])
    assert found.status == Status.CRASHED
    assert (
        found.message == "code -11; alone, in a fresh process, this input does not fail"
    )
    assert not worker.failed_at_once


def test_an_input_that_is_not_finished_alone_leaves_the_failure_as_it_is() -> None:
    crash = result(Status.CRASHED, message="code -11")
    assert tried([crash, result(Status.UNFINISHED)])[0] is crash


def test_a_single_case_that_holds_the_second_time_holds() -> None:
    job = replace(JOB, case="x")
    assert tried([result(Status.CRASHED), HELD], job)[0].status == Status.HELD


def test_measured_and_probed_cases_are_tried_once() -> None:
    for job in (
        replace(JOB, case="x", is_measured=True),
        replace(JOB, case="x", probe={}),
    ):
        assert tried([result(Status.CRASHED)], job)[0].status == Status.CRASHED


def test_memory_that_runs_out_is_tried_in_a_process_of_its_own() -> None:
    full = result(Status.OUT_OF_MEMORY)
    found, worker = tried([full, HELD, result(Status.BROKEN, what="lse")])
    assert (found.status, found.what) == (Status.BROKEN, "lse")
    assert worker.stops == 1 and worker.jobs[2] == JOB


def test_a_case_that_is_slow_once_is_a_note() -> None:
    found, worker = tried([result(Status.HANGS), HELD, HELD])
    assert found.status == Status.HELD and found.details["note"].endswith(": x")
    assert worker.stops == 1


def test_a_law_that_hangs_again_hangs() -> None:
    hang = result(Status.HANGS, message="it took more than 1 seconds")
    found, _ = tried([hang, HELD, hang])
    assert found.status == Status.HANGS and "does not fail" in found.message


def test_a_law_whose_time_is_over_before_it_is_judged_again_is_not_finished() -> None:
    late = result(Status.UNFINISHED, reason="0 cases held")
    found, _ = tried([result(Status.HANGS), HELD, late])
    assert found.status == Status.UNFINISHED and found.details["note"].endswith(": x")


class FirstCall(Scripted):
    """A worker whose process has made no call."""

    def __init__(self, results: Sequence[Result]) -> None:
        super().__init__(results)
        self._calls = 0


def test_the_first_call_of_a_process_was_alone_unless_it_was_slow() -> None:
    worker = FirstCall([result(Status.CRASHED)])
    assert worker.try_law(JOB, "area").status == Status.CRASHED
    assert worker.failed_at_once and len(worker.jobs) == 1
    worker = FirstCall([result(Status.HANGS), result(Status.HANGS)])
    assert worker.try_law(JOB, "area").status == Status.HANGS
    assert worker.failed_at_once and len(worker.jobs) == 2


def test_the_batch_of_a_crash_on_a_gpu_is_looked_for_once() -> None:
    last, own = result(Status.CRASHED, "last"), result(Status.CRASHED, "own")
    found, worker = tried([last, own, own], SIGNED, "cuda")
    assert found.case == "own" and worker.jobs[1].waits_for_each
    found, _ = tried([last, HELD, HELD], SIGNED, "cuda")
    assert "it does not recur if each call is waited for" in found.message
    found, worker = tried([last, result(Status.UNFINISHED), last], SIGNED, "cuda")
    assert found.case == "last" and "recur" not in found.message


# the process


class FakeProcess:
    """A process that has ended with a code, or runs."""

    def __init__(self, code: int | None, said: str = "") -> None:
        self.code = code
        self.stdin = io.StringIO()

    def wait(self, seconds: float | None = None) -> int:
        """Return the code."""
        if self.code is None:
            raise subprocess.TimeoutExpired("worker", seconds or 0)
        return self.code

    def kill(self) -> None:
        """End the process."""
        self.code = -signal.SIGKILL


def ended(code: int | None, said: str = "") -> tuple[Status, str]:
    """Return how a process ended that has printed something."""
    worker = Worker("own", "cpu")
    worker._process = FakeProcess(code)  # type: ignore[assignment]
    worker._said = io.StringIO(said)  # type: ignore[assignment]
    return worker._ended(3.0)


def test_the_end_of_a_process_has_a_status_and_its_last_words() -> None:
    assert ended(None) == (Status.HANGS, "it took more than 3 seconds")
    assert ended(-signal.SIGKILL)[0] == Status.OUT_OF_MEMORY
    assert ended(3) == (Status.CRASHED, "the process ended with code 3")
    words = ended(7, "one\n\nlast words\n")
    assert words == (Status.CRASHED, "the process ended with code 7: last words")
    fault = (
        'x\nFatal Python error: Aborted\n\n  File "/k/own.py", line 5 in run\nmore\n'
    )
    assert ended(-6, fault)[1] == (
        "the process ended with code -6: Fatal Python error: Aborted, at line 5 of own.py,"
        " in run"
    )


def frames(*files: str) -> list[str]:
    return [f'  File "{file}", line {n} in f' for n, file in enumerate(files, 1)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["/k/own.py"], ", at line 1 of own.py, in f"),
        (
            [f"{module.PYTHON}/ctypes/__init__.py", "/k/own.py"],
            ", at line 2 of own.py, in f",
        ),
        (["/x/torch/_ops.py", "/k/own.py"], ", at line 2 of own.py, in f"),
        (
            ["/x/triton/a.py", "/x/numpy/b.py", "/k/own.py"],
            ", at line 3 of own.py, in f",
        ),
        (
            [f"{module.PYTHON}/site-packages/kernels/own.py"],
            ", at line 1 of own.py, in f",
        ),
        ([f"{module.SUITE}running/trial.py", "/k/own.py"], ""),
        ([f"{module.PYTHON}/threading.py"], ""),
        ([], ""),
    ],
)
def test_the_line_that_ended_a_process_is_one_of_the_kernel(
    files: list[str], words: str
) -> None:
    assert _line_of_kernel(["Current thread", *frames(*files)]) == words


class Told(Worker):
    """A worker that gets messages from a list instead of from a process."""

    def __init__(
        self, messages: list[dict[str, Any]], code: int | None, **given: Any
    ) -> None:
        super().__init__("told", "cpu", **given)
        self.messages, self.code, self.sent = messages, code, []

    def start(self) -> None:
        """Start a process that has ended, or runs."""
        self._process = FakeProcess(self.code)  # type: ignore[assignment]
        self._said = io.StringIO()  # type: ignore[assignment]
        self._lines = io.BytesIO()  # type: ignore[assignment]

    def _send(self, words: dict[str, Any]) -> None:
        self.sent.append(words)

    def _next(self, deadline: float) -> dict[str, Any] | None:
        return self.messages.pop(0) if self.messages else None


def case(name: str, calls: int = 1, held: int = 0) -> dict[str, Any]:
    return {"case": name, "calls": calls, "held": held}


def as_message(own: Result, **given: Any) -> dict[str, Any]:
    return {"result": asdict(own) | {"status": own.status.value}, "calls": 7} | given


def test_the_result_of_a_process_is_returned() -> None:
    worker = Told([case("a"), as_message(HELD, is_last=False)], None)
    assert worker._try(JOB, "area") == HELD
    assert worker._calls == 7 and worker._process is not None
    worker = Told([as_message(result(Status.CRASHED), is_last=True)], 0)
    assert worker._try(JOB, "area").status == Status.CRASHED
    assert worker._process is None


def test_a_process_that_ends_has_crashed_on_its_last_case() -> None:
    worker = Told([case("a", held=0), case("b", held=1)], 3)
    found = worker._try(JOB, "area")
    assert (found.status, found.case, found.cases) == (Status.CRASHED, "b", 2)
    assert worker._process is None


def test_a_case_past_its_own_limit_hangs() -> None:
    found = Told([case("a")], None, seconds_of_a_case=2.0)._try(JOB, "area")
    assert found.status == Status.HANGS
    assert found.message == "it took more than 2 seconds"


def test_a_case_past_the_time_of_its_law_is_not_finished() -> None:
    worker = Told([case("a"), case("b", held=4)], None, seconds_of_a_law=0.0)
    found = worker._try(JOB, "area")
    assert (found.status, found.cases, found.case) == (Status.UNFINISHED, 4, "b")
    crashed = Told([case("a")], 3, seconds_of_a_law=0.0)._try(JOB, "area")
    assert crashed.status == Status.CRASHED


def test_a_failure_that_was_being_made_smaller_is_kept_when_the_time_is_over() -> None:
    failure = result(Status.BROKEN, what="slots")
    told = {"failure": asdict(failure) | {"status": failure.status.value}}
    worker = Told([case("a"), told, case("b")], None, seconds_of_a_law=0.0)
    found = worker._try(JOB, "area")
    assert (found.status, found.what) == (Status.BROKEN, "slots")
    assert found.reason == module.NOT_SMALLER


def test_the_time_of_a_job_is_that_of_its_law_or_what_is_left() -> None:
    worker = Told([as_message(HELD, is_last=False)], None, seconds_of_a_law=50.0)
    worker._try(JOB, "area")
    assert worker.sent[0]["seconds"] == 50.0
    worker.messages = [as_message(HELD, is_last=False)]
    worker._try(replace(JOB, case="x"), "area")
    assert worker.sent[1]["seconds"] == math.inf
    worker.messages = [as_message(HELD, is_last=False)]
    worker.deadline = 0.0
    worker._try(JOB, "area")
    assert worker.sent[2]["seconds"] == 0.0


@pytest.mark.extended
def test_an_import_that_fails_raises_its_own_error(
    tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dies_at_import.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "has_nothing.py").write_text("")
    for name, error, words in (
        ("dies_at_import", ImportError, "ended with code 3"),
        ("no_such_kernels", ModuleNotFoundError, "was not found"),
        ("has_nothing", ValueError, "has none of the operations"),
    ):
        worker = Worker(name, "cpu")
        with pytest.raises(error, match=words):
            worker.start()
        assert worker._process is None


def test_a_broken_pipe_is_not_an_error() -> None:
    with _ignore_broken_pipe():
        raise BrokenPipeError
    with pytest.raises(OSError, match="other"), _ignore_broken_pipe():
        raise OSError("other")
