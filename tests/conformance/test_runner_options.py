"""The runner of a check: what is tried, in which processes, and what the report contains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pagetwin.conformance.api import check as runner
from pagetwin.conformance.api.check import (
    check_implementation,
    choose_laws,
    with_known,
)
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.limits import SMALLEST_LAW, TimeLimits
from pagetwin.conformance.running.worker import Job, signatures_on
from wrong_adapters import LAWS, WRONG


def result(law: Law, status: Status = Status.HELD, **given: Any) -> Result:
    return Result(law.name, law.area, status, **given)


class Fake:
    """What tries the laws: WRONG breaks. It notes jobs, and what was tried again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[Job] = []
        self.again: list[Any] = []
        self.promises: tuple[str, ...] = ()
        monkeypatch.setattr(runner, "ALL_LAWS", LAWS)
        monkeypatch.setattr(runner, "_trying", self.trying)
        monkeypatch.setattr(runner, "Worker", lambda *given: given)
        monkeypatch.setattr(runner, "try_symptoms_again", self.try_again)
        monkeypatch.setattr(
            runner,
            "explain_nans",
            lambda name, device, found, left: [
                replace(judged, cause="c") for judged in found
            ],
        )

    @contextmanager
    def trying(self, *given: Any) -> Iterator[Any]:
        yield self.try_all, self.promises

    def try_all(self, laws: list[Law], job: Job) -> Iterator[tuple[Law, Result]]:
        self.jobs.append(job)
        for law in reversed(laws):
            yield law, result(law, Status.BROKEN if law is WRONG else Status.HELD)

    def try_again(self, worker: Any, found: list[Result], left: Any) -> list[Result]:
        self.again.append(worker)
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def check(**given: Any) -> Any:
    return check_implementation("own", device="cpu", **given)


# a whole check


def test_a_report_has_the_laws_in_their_order_and_how_they_were_tried(
    fake: Fake,
) -> None:
    told: list[Result] = []
    known = {WRONG.name: "why"}
    report = check(seed=3, examples=1, known_failures=known, on_result=told.append)
    assert [judged.law for judged in report.results] == [law.name for law in LAWS]
    assert [judged.law for judged in told] == [law.name for law in reversed(LAWS)]
    statuses = {judged.law: (judged.status, judged.reason) for judged in told}
    assert statuses[WRONG.name] == (Status.KNOWN, "why")
    assert report.settings == {"seed": 3, "examples": 1} and report.outside == ()
    assert {judged.cause for judged in report.results} == {"c"}
    assert (fake.jobs[0].seed, fake.jobs[0].examples) == (3, 1)
    assert len(fake.jobs) == 1 and not report.is_outside_promised


@pytest.mark.parametrize(
    ("given", "signatures"), [(None, signatures_on("cpu")), (0, None), (7, 7)]
)
def test_the_number_of_signatures_may_be_given(
    fake: Fake, given: int | None, signatures: int | None
) -> None:
    check(signatures=given)
    assert fake.jobs[0].signatures == signatures


@pytest.mark.parametrize("promises", [(), ("undeclared",)])
def test_calls_outside_are_tried_and_reported_apart(
    fake: Fake, promises: tuple[str, ...]
) -> None:
    fake.promises = promises
    told: list[Result] = []
    report = check(outside=True, on_result=told.append)
    assert [job.outside for job in fake.jobs] == [False, True]
    assert [result_outside.law for result_outside in report.outside] == [
        law.name for law in LAWS
    ]
    assert len(told) == 2 * len(LAWS)
    assert report.is_outside_promised == bool(promises)


def test_failures_are_tried_again_in_a_fresh_process_if_laws_run_in_processes(
    fake: Fake,
) -> None:
    check()
    assert len(fake.again) == 1 and fake.again[0][:2] == ("own", "cpu")
    check(isolated=False)
    check(only=LAWS[0].name)
    assert len(fake.again) == 1


def test_laws_are_chosen_by_words_of_their_sentence_or_area() -> None:
    law = LAWS[0]
    assert law in choose_laws(law.name) and law in choose_laws(law.area)
    assert choose_laws(law.name) == [law] and len(choose_laws(law.area)) < 99
    with pytest.raises(ValueError, match="no law"):
        choose_laws("no law has such words")


@pytest.mark.parametrize(
    ("status", "changed"),
    [
        (Status.BROKEN, Status.KNOWN),
        (Status.CRASHED, Status.KNOWN),
        (Status.HELD, Status.UNEXPECTED),
        (Status.OUTSIDE, Status.UNEXPECTED),
        (Status.UNFINISHED, Status.UNFINISHED),
    ],
)
def test_a_known_failure_is_known_until_it_holds(
    status: Status, changed: Status
) -> None:
    own = result(WRONG, status)
    found = with_known(own, "why")
    assert found.status == changed
    assert found.reason == ("" if changed == status else "why")
    assert with_known(own, None) == own


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": 0}, "workers = 0: expected at least 1"),
        ({"workers": 100_000}, "workers = 100000: expected at most"),
        ({"workers": 2, "isolated": False}, "expected 1, which is this process"),
        ({"examples": 0}, "examples = 0: expected at least 1"),
        ({"signatures": -1}, "signatures = -1: expected 0 for any"),
        ({"known_failures": {"no law": "-"}}, "expected sentences of laws"),
    ],
)
def test_arguments_out_of_range_are_rejected_before_anything_is_tried(
    fake: Fake, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check(**given)
    assert not fake.jobs


# processes


def test_laws_in_this_process_have_the_jobs_seed_time_and_signatures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = SimpleNamespace(support=SimpleNamespace(rejects=["undeclared"]))
    inside.outside = lambda: "outside"
    given: list[Any] = []

    def try_law(law: Law, setting: Any, *args: Any, **named: Any) -> Result:
        given.append((setting.candidate, *args, named))
        return result(law)

    setting = SimpleNamespace(candidate=inside)
    monkeypatch.setattr(runner, "load_candidate", lambda name: inside)
    monkeypatch.setattr(runner, "make_setting", lambda candidate, device: setting)
    monkeypatch.setattr(
        runner, "replace", lambda one, candidate: SimpleNamespace(candidate=candidate)
    )
    monkeypatch.setattr(runner, "try_law", try_law)
    limits = TimeLimits(30.0, 5.0, 1.0)
    with runner._trying("own", "cpu", False, limits, 1) as (try_all, promises):
        assert list(promises) == ["undeclared"] and limits.deadline < float("inf")
        for outside in (False, True):
            job = Job("", 3, 7, signatures=2, outside=outside)
            assert [law for law, _ in try_all(LAWS[:1], job)] == LAWS[:1]
    assert [trial[1:3] for trial in given] == [(3, 7)] * 2
    assert [trial[0] for trial in given] == [inside, "outside"]
    assert all(trial[3]["signatures"] == 2 for trial in given)
    assert all(0 < trial[3]["seconds"] <= 30.0 for trial in given)


class FakeWorker:
    """A process that notes its calls."""

    made: ClassVar[list["FakeWorker"]] = []
    answer: Callable[[Job], Result] = staticmethod(lambda job: result(LAWS[0]))

    def __init__(self, implementation: str, *limits: float, gpu: Any = None) -> None:
        self.implementation, self.limits = implementation, limits
        self.calls: list[str] = []
        self.deadline, self.known, self.promises = -1.0, None, ("undeclared",)
        self.failed_at_once = False
        FakeWorker.made.append(self)

    def start(self) -> None:
        self.calls.append("start")
        self.known = "known"

    def stop(self) -> None:
        self.calls.append("stop")

    def try_law(self, job: Job, area: str) -> Result:
        self.calls.append(job.law)
        return FakeWorker.answer(job)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    monkeypatch.setattr(FakeWorker, "made", [])
    monkeypatch.setattr(runner, "Worker", FakeWorker)
    return FakeWorker.made


def test_processes_share_a_deadline_and_are_stopped(workers: list[FakeWorker]) -> None:
    limits = TimeLimits(30.0, 5.0, 1.0)
    with runner._trying("own", "cpu", True, limits, 2) as (try_all, promises):
        found = [law.name for law, _ in try_all(LAWS, Job("", 3, 7))]
        assert promises == ("undeclared",)
    assert sorted(found) == sorted(law.name for law in LAWS)
    assert [worker.deadline for worker in workers] == [limits.deadline] * 2
    assert limits.deadline < float("inf") and {worker.known for worker in workers} == {
        "known"
    }
    starts = [worker.calls.count("start") for worker in workers]
    assert sum(starts) == 1 and all(worker.calls[-1] == "stop" for worker in workers)
    tried = [call for worker in workers for call in worker.calls]
    assert tried.count(SMALLEST_LAW) >= 1
    assert {law.name for law in LAWS} <= {*tried}


def test_an_interrupted_check_starts_no_process_again(
    workers: list[FakeWorker],
) -> None:
    limits = TimeLimits(30.0, 5.0, 1.0)
    with (
        pytest.raises(KeyboardInterrupt),
        runner._trying("own", "cuda", True, limits, 1),
    ):
        raise KeyboardInterrupt
    (worker,) = workers
    assert worker.deadline == 0.0 and worker.calls == ["start", "stop", "stop"]


def test_laws_that_cannot_be_tried_are_not(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []
    untried = result(WRONG, Status.NOT_TRIED)
    endings = SimpleNamespace(
        untried=lambda law: untried if law is WRONG else None,
        note=lambda *given: noted.append(given),
    )
    monkeypatch.setattr(runner, "Endings", lambda: endings)
    with runner._trying("own", "cuda", True, TimeLimits(30.0, 5.0, 1.0), 1) as (go, _):
        found = dict((law.name, judged) for law, judged in go(LAWS, Job("", 3, 7)))
    assert found[WRONG.name] is untried and WRONG.name not in workers[0].calls
    assert len(noted) == len(LAWS) - 1 and noted[0][2] is False


def test_a_kernel_that_needs_a_gpu_says_so(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = result(LAWS[0], Status.BROKEN, message="no CUDA device")
    monkeypatch.setattr(FakeWorker, "answer", staticmethod(lambda job: broken))
    limits = TimeLimits(30.0, 5.0, 1.0)
    words = r"own needs a GPU \(no CUDA device\)"
    with (
        pytest.raises(ValueError, match=words),
        runner._trying("own", "cpu", True, limits, 1),
    ):
        raise AssertionError("laws are tried")
    assert workers[0].calls[-1] == "stop"
    with runner._trying("own", "cuda", True, limits, 1) as (_, promises):
        assert promises == ("undeclared",)
