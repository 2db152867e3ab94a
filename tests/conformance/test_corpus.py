"""The corpus of fuzzing: what stays in it, what leaves it, and what cannot be read."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance.api import fuzz
from pagetwin.conformance.api.check import choose_laws
from pagetwin.conformance.api.corpus import (
    FAILURES,
    TRIED,
    Corpus,
    Line,
    check_numbers,
)
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.cases.signatures import VERSION
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.worker import Job

PAGED = "paged attention is right for every batch of a signature"
SLOTS = "every new token gets the slot of its block table row"
BLOCKS = "blocks needed are the fewest that hold the tokens"
FAILED = Result(
    PAGED, "signatures", Status.BROKEN, cases=3, case="SignedBatch(1)", what="output",
    where="at token 1, 9 times the row's budget", found="1.5", right="2.5",
)  # fmt: skip
OLD = json.dumps({"law": PAGED, "signature": 1, "first": 0, "cases": 2, "version": 0})
"""A line of batches that another version drew."""
Answer = Callable[[Job, int], Result]
"""The result of a job, from the number of processes that were started."""


class ToldWorker:
    """A worker whose results a function returns, from the job and the number of starts."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.starts = 1
        self.deadline = 0.0

    def stop(self) -> None:
        """Count a fresh process."""
        self.starts += 1

    def start(self) -> None:
        """Do nothing."""

    def try_law(self, job: Job, area: str) -> Result:
        """Return the result of a job."""
        return replace(self.answer(job, self.starts), law=job.law, area=area)


def result(status: Status, **more: Any) -> Result:
    """Return a result of one case."""
    return Result("", "", status, **{"cases": 1} | more)


HELD = result(Status.HELD)


def try_stored(
    folder: Path, failures: list[Result], answer: Answer, only: str | None = None
) -> tuple[fuzz.Fuzzing, list[Result]]:
    """Return a run that has tried the stored failures, and what still fails."""
    run = fuzz.Fuzzing("reference", "cpu")
    stored = Corpus(folder, "reference")
    stored.failures = failures
    worker: Any = ToldWorker(answer)
    seen: list[Result] = []
    laws = choose_laws(only)
    still = fuzz._try_stored(
        run, stored, laws, worker, lambda run, one: seen.append(one)
    )
    assert len(seen) == sum(
        failure.law in {law.name for law in laws} for failure in failures
    )
    return run, still


# stored failures


def test_a_stored_failure_leaves_when_its_case_holds_also_in_a_fresh_process(
    tmp_path: Path,
) -> None:
    run, still = try_stored(tmp_path, [FAILED], lambda job, starts: HELD)
    assert run.fixed == [PAGED] and not still


@pytest.mark.parametrize(
    "status", [Status.BROKEN, Status.CRASHED, Status.HANGS, Status.OUT_OF_MEMORY]
)
def test_a_stored_failure_that_fails_stays_with_its_new_result(
    status: Status, tmp_path: Path
) -> None:
    now = result(status, case="SignedBatch(0)")
    run, still = try_stored(tmp_path, [FAILED], lambda job, starts: now)
    assert not run.fixed and [failure.status for failure in still] == [status]
    assert still[0].case == "SignedBatch(0)"


def test_a_stored_failure_stays_if_its_case_is_not_finished(tmp_path: Path) -> None:
    """It was counted as fixed, because a law that is not finished has not failed."""
    now = result(Status.UNFINISHED)
    run, still = try_stored(tmp_path, [FAILED], lambda job, starts: now)
    assert not run.fixed and still == [FAILED]


def test_a_stored_failure_stays_if_it_fails_in_a_fresh_process_alone(
    tmp_path: Path,
) -> None:
    failed = result(Status.BROKEN, case="SignedBatch(1)")
    run, still = try_stored(
        tmp_path, [FAILED], lambda job, starts: HELD if starts == 1 else failed
    )
    assert not run.fixed and len(still) == 1


def test_failures_of_laws_that_are_not_tried_stay(tmp_path: Path) -> None:
    others = [FAILED, replace(FAILED, law=SLOTS, case="")]
    run, still = try_stored(tmp_path, others, lambda job, starts: HELD, BLOCKS)
    assert still == others and not run.fixed


def finish(
    folder: Path,
    still: list[Result],
    new: list[Result],
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer | None = None,
) -> fuzz.Fuzzing:
    """Return a run with stored failures and new ones, whose corpus is written."""
    own = answer or (lambda job, starts: replace(FAILED, case=job.case or ""))
    monkeypatch.setattr(fuzz, "Worker", lambda *given: ToldWorker(own))
    monkeypatch.setattr(fuzz, "explain_nans", lambda name, device, results: results)
    run, stored = fuzz.Fuzzing("reference", "cpu"), Corpus(folder, "reference")
    stored.failures = still
    laws = choose_laws(None)
    drawing = fuzz._Drawing(laws, stored, still, 5, 64, None, "cpu")
    drawing.failures += new
    fuzz._finish(run, stored, laws, drawing, still)
    return run


def test_failures_that_are_alike_stay_while_each_of_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first one of each symptom was stored, so the others were lost."""
    stored = [
        FAILED,
        replace(FAILED, case="SignedBatch(2)"),
        replace(FAILED, law=SLOTS),
    ]
    new = [replace(FAILED, case="SignedBatch(3)"), replace(FAILED, what="lse")]
    run = finish(tmp_path, stored, new, monkeypatch)
    kept = Corpus(tmp_path, "reference").failures
    assert {(failure.law, failure.case) for failure in stored} <= {
        (e.law, e.case) for e in kept
    }
    assert len(kept) == 4 and {failure.what for failure in kept} == {"output", "lse"}
    assert len(run.failures) == 2 and len(run.programs) == 4
    assert all(path.exists() for path in run.programs)


def test_a_new_failure_says_if_it_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finish(tmp_path, [], [FAILED], monkeypatch, lambda job, starts: HELD)
    (failure,) = run.failures
    words = "alone, in a fresh process, this input does not fail"
    assert words in failure.summary and words in Path(run.programs[0]).read_text()


# jobs


def line(**given: Any) -> Line:
    """Return the line of a job of batches."""
    return Line(**{"law": PAGED, "signature": 1, "first": 0, "cases": 8} | given)


def filled(folder: Path, *lines: Line) -> Corpus:
    """Return a corpus that some jobs were written to."""
    corpus = Corpus(folder, "reference")
    for added in lines:
        corpus.append(replace(added, version=VERSION))
    return Corpus(folder, "reference")


def test_what_was_tried_is_read_from_the_lines(tmp_path: Path) -> None:
    corpus = filled(
        tmp_path,
        line(),
        line(first=8, cases=24),
        line(signature=2, status=str(Status.BROKEN)),
        line(signature=3, status=str(Status.UNFINISHED)),
        line(signature=4, status=str(Status.OUTSIDE)),
        line(law=SLOTS, signature=None, first=6),
        line(law=SLOTS, signature=None, first=2),
    )
    assert corpus.tried_batches() == {
        (PAGED, 1): 32,
        (PAGED, 2): 8,
        (PAGED, 3): 8,
        (PAGED, 4): 8,
    }
    assert corpus.broken_signatures() == {(PAGED, 2)}
    assert corpus.next_seeds() == {SLOTS: 7}
    summary = corpus.summary()
    assert (summary["cases"], summary["cases of signatures"]) == (72, 56)
    assert (summary["cases of laws"], summary["signatures"]) == (16, 4)


def test_a_line_that_was_cut_is_left_out_and_the_next_one_is_read(
    tmp_path: Path,
) -> None:
    corpus = filled(tmp_path, line())
    with (corpus.folder / TRIED).open("a") as file:
        file.write('{"law": "pag')
    corpus = Corpus(tmp_path, "reference")
    corpus.append(line(signature=9, version=VERSION))
    assert [
        kept_line.signature for kept_line in Corpus(tmp_path, "reference").lines
    ] == [1, 9]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (TRIED, '{"other": 1}\n', "remove it to start anew"),
        (TRIED, OLD, "drawn by version 0"),
        (FAILURES, '{"failures": [{"law": 1}]}', "remove it to start anew"),
        (FAILURES, "[]", "remove it to start anew"),
    ],
)  # fmt: skip
def test_foreign_files_are_named(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "reference"
    folder.mkdir()
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        Corpus(tmp_path, "reference")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        Corpus(tmp_path / "file", "reference")
    with pytest.raises(ValueError, match="a name of 300 bytes"):
        Corpus(tmp_path / ("a" * 300), "reference")
    with pytest.raises(PermissionError, match="no file can be created in /proc"):
        Corpus(Path("/proc/pagetwin"), "reference")


def test_nothing_is_written_for_a_run_that_tried_nothing(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "new", "reference")
    assert corpus.write(Report("reference", "cpu", ()), []) == []
    assert not corpus.folder.exists()


def test_programs_of_failures_that_are_gone_are_removed_and_alike_ones_are_numbered(
    tmp_path: Path,
) -> None:
    corpus, report = Corpus(tmp_path, "reference"), Report("reference", "cpu", ())
    two = [FAILED, replace(FAILED, case="SignedBatch(2)")]
    programs = corpus.write(report, two)
    assert len({*programs}) == 2
    assert corpus.write(report, two[:1]) == programs[:1]
    assert not programs[1].exists()
    assert Corpus(tmp_path, "reference").failures == two[:1]
    assert not list(corpus.folder.glob(".*"))


@pytest.mark.parametrize("number", [0, -1])
def test_numbers_below_one_are_rejected(number: int) -> None:
    check_numbers(0.1, examples=1, cases=None)
    with pytest.raises(ValueError, match="minutes"):
        check_numbers(number)
    with pytest.raises(ValueError, match=f"examples = {number}"):
        check_numbers(1, examples=number)


def drawing_of(folder: Path, **given: Any) -> fuzz._Drawing:
    """Return what selects the jobs of a run."""
    options = {"examples": 5, "batches": 64, "cases": None, "device": "cpu"} | given
    return fuzz._Drawing(choose_laws(None), Corpus(folder, "reference"), [], **options)


def test_laws_of_repeated_calls_come_first_and_others_get_a_share(
    tmp_path: Path,
) -> None:
    drawing = drawing_of(tmp_path)
    drawing.spent = {"laws": 1e6, "signatures": 1.0}
    first = [law for law in drawing.others if law.area == fuzz.FIRST]
    found = [drawing.next_law() for _ in first]
    assert [due_law and due_law[0].name for due_law in found] == [
        law.name for law in first
    ]
    assert drawing.next_law() is None
    drawing.spent = {"laws": 0.0, "signatures": 1.0}
    assert drawing.next_law() is not None


def test_a_law_that_failed_is_not_tried_on_further_seeds(tmp_path: Path) -> None:
    drawing = drawing_of(tmp_path)
    due = drawing.next_law()
    assert due is not None
    law, job = due
    broken = Result(law.name, law.area, Status.BROKEN, cases=2, case="x", what="w")
    assert drawing.end(law, job, broken, is_cut=False) == 2
    assert drawing.failures == [broken]
    others = len(drawing.others)
    following = [drawing.next_law() for _ in range(2 * others)]
    seeds = Counter(due_law[1].law for due_law in following if due_law is not None)
    assert law.name not in seeds
    # a list of cases is the same for every seed
    listed = [
        law_left
        for law_left in drawing.others
        if not isinstance(law_left.cases, SearchStrategy)
    ]
    assert len(listed) > 5 and all(seeds[law_left.name] <= 1 for law_left in listed)
    drawn = [
        (due_law[1].law, due_law[1].seed)
        for due_law in following
        if due_law is not None
    ]
    assert len(drawn) == len(set(drawn))


def test_causes_of_nan_are_in_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explain(name: str, device: str, results: list[Result]) -> list[Result]:
        return [
            replace(failure, cause="is not written everywhere") for failure in results
        ]

    monkeypatch.setattr(
        fuzz, "Worker", lambda *given: ToldWorker(lambda job, n: FAILED)
    )
    monkeypatch.setattr(fuzz, "explain_nans", explain)
    run, drawing = fuzz.Fuzzing("reference", "cpu"), drawing_of(tmp_path)
    drawing.failures = [replace(FAILED, found="nan")]
    fuzz._finish(run, drawing.corpus, choose_laws(None), drawing, [])
    assert [failure.cause for failure in run.failures] == ["is not written everywhere"]


def test_pictures_are_not_stored(tmp_path: Path) -> None:
    drawing = drawing_of(tmp_path)
    unit = drawing.next_signature()
    assert unit is not None
    job = drawing.next_batches(*unit)
    assert job is not None and job.examples == 32
    details = {"picture": {"where": "a long one"}, "counts": {"keys": 3}}
    held = Result(unit[0].name, "", Status.HELD, cases=32, details=details)
    drawing.end(unit[0], job, held, is_cut=False)
    assert drawing.corpus.lines[0].details == {"counts": {"keys": 3}}
    following = drawing.next_batches(*unit)
    assert following is not None and (following.seed, following.examples) == (32, 32)


def test_a_result_after_a_failure_does_not_hide_it(tmp_path: Path) -> None:
    drawing = drawing_of(tmp_path)
    for judged in (FAILED, replace(HELD, law=PAGED)):
        drawing._count(judged)
    assert drawing.results[PAGED].status == Status.BROKEN
    assert drawing.results[PAGED].cases == 4
