"""Jobs of a fuzzing run: which law or signature is next, what is left, and what counts."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance.api import fuzz
from pagetwin.conformance.api.check import choose_laws
from pagetwin.conformance.api.corpus import Corpus
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.worker import Job

LAWS = choose_laws(None)
SIGNED = [law for law in LAWS if law.area == fuzz.AREA]
DRAWN = [
    law
    for law in LAWS
    if law.area not in (fuzz.AREA, fuzz.FIRST) and isinstance(law.cases, SearchStrategy)
]
LISTED = next(law for law in LAWS if not isinstance(law.cases, SearchStrategy))


def drawing(folder: Path, laws: Any = LAWS, **given: Any) -> fuzz._Drawing:
    """Return what selects the jobs of a run."""
    failures = given.pop("failures", [])
    options = {"examples": 5, "batches": 64, "cases": None, "device": "cpu"} | given
    return fuzz._Drawing(laws, Corpus(folder, "reference"), failures, **options)


def result(law: Law, status: Status = Status.HELD, **given: Any) -> Result:
    return Result(law.name, law.area, status, **{"cases": 3, "seconds": 2.0} | given)


def end(
    own: fuzz._Drawing, law: Law, found: Result, signature: int | None = None
) -> int:
    """End a job of five cases with a result."""
    return own.end(law, Job(law.name, 0, 5, signature=signature), found, False)


# which job is next


def test_laws_go_in_turn_each_on_its_next_seed(tmp_path: Path) -> None:
    own = drawing(tmp_path, DRAWN[:3])
    found = [own.next_law() for _ in range(7)]
    jobs = [(due[1].law, due[1].seed, due[1].examples) for due in found if due]
    names = [law.name for law in DRAWN[:3]]
    assert jobs == [(names[n % 3], n // 3, 5) for n in range(7)]


def test_laws_of_a_gpu_have_few_signatures(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        due = drawing(tmp_path, DRAWN[:1], device=device).next_law()
        assert due is not None
        assert due[1].signatures == fuzz.signatures_on(device)
    assert fuzz.signatures_on("cuda") is not None


def test_laws_get_their_share_only_beside_signatures(tmp_path: Path) -> None:
    own = drawing(tmp_path, [*SIGNED, *DRAWN[:2]])
    for laws, is_due in ((1.0, True), (1.1, True), (1.2, False)):
        own.spent = {"laws": laws, "signatures": 10.0}
        assert (own.next_law() is not None) == is_due
    own.signed = []
    own.spent = {"laws": 99.0, "signatures": 0.0}
    assert own.next_law() is not None


def test_signatures_of_all_laws_take_turns(tmp_path: Path) -> None:
    own = drawing(tmp_path, SIGNED, cases=1)
    count = len(SIGNED)
    found = [own.next_signature() for _ in range(2 * count)]
    names = [(due[0].name, due[1]) for due in found if due is not None]
    assert names == [(SIGNED[n % count].name, n // count) for n in range(2 * count)]
    own.left = 0
    assert own.next_signature() is None
    own.left = 1
    own.broken = {(SIGNED[0].name, 2)}
    own.tried[SIGNED[1].name, 2] = own.batches
    after = own.next_signature()
    assert after is not None and (after[0], after[1]) == (SIGNED[2], 2)


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 32), ("cuda", 256)])
def test_jobs_of_a_signature_are_parts_of_its_batches(
    tmp_path: Path, device: str, at_once: int
) -> None:
    own = drawing(tmp_path, SIGNED, batches=300, device=device)
    law, found = SIGNED[0], []
    while (job := own.next_batches(law, 7)) is not None:
        assert (job.law, job.signature) == (law.name, 7)
        found.append((job.seed, job.examples))
        own.tried[law.name, 7] = job.seed + job.examples
    firsts = range(0, 300, at_once)
    assert found == [(first, min(at_once, 300 - first)) for first in firsts]
    own.tried[law.name, 8] = 999
    assert own.next_batches(law, 8) is None
    assert own.next_batches(law, 9) is not None
    own.broken.add((law.name, 10))
    assert own.next_batches(law, 10) is None
    own._close(law)
    assert own.next_batches(law, 9) is None and own.signed == SIGNED[1:]


def test_no_more_than_the_cases_that_are_left_are_reserved(tmp_path: Path) -> None:
    own = drawing(tmp_path, [*SIGNED, DRAWN[0]], cases=8)
    first, second = own.next_law(), own.next_law()
    assert first is not None and second is not None
    assert (first[1].examples, second[1].examples, own.left) == (5, 3, 0)
    assert own.next_law() is None and own.next_signature() is None
    assert own.next_batches(SIGNED[0], 0) is None
    # a list of cases is tried whole, and costs none of them
    listed = drawing(tmp_path, [LISTED], cases=8)
    due = listed.next_law()
    assert due is not None and due[1].examples == 0 and listed.left == 8
    end(listed, LISTED, result(LISTED))
    assert listed.left == 8 and listed.next_law() is None


def test_a_run_that_is_stopped_has_no_job(tmp_path: Path) -> None:
    own = drawing(tmp_path, [*SIGNED, *DRAWN])
    own.stop()
    assert own.next_law() is None and own.next_signature() is None


def test_laws_that_fail_in_the_corpus_are_left(tmp_path: Path) -> None:
    failed = result(DRAWN[0], Status.BROKEN, case="x")
    own = drawing(tmp_path, DRAWN[:2], failures=[failed])
    found = [own.next_law() for _ in range(2)]
    assert [due and due[0] for due in found] == [DRAWN[1]] * 2
    assert own.failures == [failed]


# what counts


def test_cases_that_were_not_tried_are_left(tmp_path: Path) -> None:
    own = drawing(tmp_path, DRAWN, cases=20)
    own.left = 10
    assert end(own, DRAWN[0], result(DRAWN[0])) == 3 and own.left == 12
    late = Job(DRAWN[0].name, 0, 5)
    assert own.end(DRAWN[0], late, result(DRAWN[0]), True) == 0 and own.left == 17


def test_time_is_counted_for_laws_and_for_signatures(tmp_path: Path) -> None:
    own = drawing(tmp_path)
    end(own, DRAWN[0], result(DRAWN[0]))
    end(own, SIGNED[0], result(SIGNED[0], seconds=5.0), signature=1)
    assert own.spent == {"laws": 2.0, "signatures": 5.0}


def test_a_line_has_what_was_tried(tmp_path: Path) -> None:
    own = drawing(tmp_path)
    assert end(own, SIGNED[0], result(SIGNED[0], skipped=1), signature=4) == 3
    (line,) = own.corpus.lines
    assert (line.law, line.signature, line.first) == (SIGNED[0].name, 4, 0)
    assert (line.cases, line.skipped, line.status) == (3, 1, "held")
    assert own.tried[SIGNED[0].name, 4] == 3 and not own.failures


def test_a_law_that_cannot_be_tried_is_closed_and_not_stored(tmp_path: Path) -> None:
    own = drawing(tmp_path)
    for law, status in ((SIGNED[0], Status.MISSING), (DRAWN[0], Status.OUTSIDE)):
        assert end(own, law, result(law, status, cases=0)) == 0
    assert own.missing == {SIGNED[0].name}
    assert own.closed == {SIGNED[0].name, DRAWN[0].name}
    assert own.signed == SIGNED[1:] and not own.corpus.lines
    assert own.results.keys() == own.closed


def test_results_of_a_law_are_added_up(tmp_path: Path) -> None:
    own = drawing(tmp_path)
    for _ in range(3):
        end(own, DRAWN[0], result(DRAWN[0], skipped=1))
    found = own.results[DRAWN[0].name]
    assert (found.cases, found.skipped, found.seconds) == (9, 3, 6.0)


def test_three_signatures_of_a_law_that_fail_alike_close_it(tmp_path: Path) -> None:
    own = drawing(tmp_path)
    law, other = SIGNED[:2]
    for number, (which, what) in enumerate(
        [(law, "a"), (other, "a"), (law, "b"), (law, "a"), (other, "a")]
    ):
        broken = result(which, Status.BROKEN, case=str(number), what=what)
        assert end(own, which, broken, signature=number) == 3
        assert own.closed == set()
        assert (which.name, number) in own.broken
    broken = result(law, Status.BROKEN, case="last", what="a")
    end(own, law, broken, signature=9)
    assert own.closed == {law.name} and law not in own.signed and other in own.signed


# jobs until the deadline


def test_results_are_told_and_counted_until_nothing_is_left(tmp_path: Path) -> None:
    own, run = drawing(tmp_path, SIGNED[:1], cases=70), fuzz.Fuzzing("reference", "cpu")
    told: list[int] = []

    def try_law(job: Job, area: str) -> Result:
        return result(SIGNED[0], cases=job.examples)

    worker: Any = SimpleNamespace(try_law=try_law)
    deadline = time.monotonic() + 60
    fuzz._work(worker, own, run, deadline, lambda run, one: told.append(run.cases))
    assert worker.deadline == deadline and run.cases == 70 and run.signatures == 2
    assert told == [32, 64, 70]


@pytest.mark.parametrize(
    ("status", "details", "area", "cases"),
    [
        (Status.UNFINISHED, {}, fuzz.AREA, 0),
        (Status.UNFINISHED, {"counts": {}}, fuzz.AREA, 3),
        (Status.UNFINISHED, {"counts": {}}, "other", 0),
        (Status.BROKEN, {}, fuzz.AREA, 3),
    ],
)
def test_what_the_deadline_cuts_counts_only_batch_by_batch(
    tmp_path: Path, status: Status, details: dict[str, Any], area: str, cases: int
) -> None:
    law = SIGNED[0] if area == fuzz.AREA else DRAWN[0]
    own, run = drawing(tmp_path, [law]), fuzz.Fuzzing("reference", "cpu")

    def try_law(job: Job, area: str) -> Result:
        time.sleep(max(0.0, deadline - time.monotonic()))
        return result(law, status, details=details)

    deadline = time.monotonic() + 0.1
    worker: Any = SimpleNamespace(try_law=try_law)
    fuzz._work(worker, own, run, deadline, lambda run, one: None)
    assert run.cases == cases and len(own.failures) == (status == Status.BROKEN)


def test_a_job_that_is_not_finished_before_the_deadline_counts(tmp_path: Path) -> None:
    own, run = drawing(tmp_path, DRAWN[:1], cases=3), fuzz.Fuzzing("reference", "cpu")
    worker: Any = SimpleNamespace(
        try_law=lambda job, area: result(DRAWN[0], Status.UNFINISHED)
    )
    fuzz._work(worker, own, run, time.monotonic() + 60, lambda run, one: None)
    assert run.cases == 3


# the end of a run


def test_the_report_has_each_law_once_and_the_corpus_each_failing_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causes: list[Result] = []

    def explain(name: str, device: str, found: list[Result]) -> list[Result]:
        causes.extend(found)
        return [replace(due, cause="found") for due in found]

    again: list[Result] = []
    monkeypatch.setattr(fuzz, "explain_nans", explain)
    monkeypatch.setattr(
        fuzz, "try_symptoms_again", lambda worker, new, most: again.extend(new) or new
    )
    stored = Corpus(tmp_path, "reference")
    laws = [*DRAWN[:3], *SIGNED[:2]]
    old = [
        result(DRAWN[0], Status.BROKEN, case=case, what="w", cause="known")
        for case in ("a", "b")
    ]
    own = drawing(tmp_path, laws, failures=old)
    run = fuzz.Fuzzing("reference", "cpu", cases=9, signatures=2)
    end(own, DRAWN[1], result(DRAWN[1]))
    end(own, DRAWN[2], result(DRAWN[2], Status.MISSING, cases=0))
    for number in range(4):
        broken = result(SIGNED[0], Status.BROKEN, case=str(number), what=f"w{number}")
        end(own, SIGNED[0], broken, signature=number)
    end(own, SIGNED[0], result(SIGNED[0]), signature=9)
    fuzz._finish(run, stored, laws, own, old)
    assert again == own.failures[2:] and len(again) == 4
    # the causes of the first four are searched, if they are not known
    assert [cause.case for cause in causes] == ["0", "1"]
    assert {failure.law for failure in run.failures} == {DRAWN[0].name, SIGNED[0].name}
    assert run.missing == [DRAWN[2].name]
    assert run.report is not None
    names = [judged.law for judged in run.report.results]
    assert names.count(DRAWN[1].name) == 1 and names.count(DRAWN[0].name) == 1
    assert run.report.settings == {"cases": 9, "signatures": 2}
    kept = [
        (failure.law, failure.case)
        for failure in Corpus(tmp_path, "reference").failures
    ]
    assert len(kept) == len(set(kept))
    assert {case for law, case in kept if law == DRAWN[0].name} == {"a", "b"}
    assert run.summary == stored.summary() != {}
