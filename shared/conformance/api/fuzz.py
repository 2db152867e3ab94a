"""Fuzzing: batches of drawn signatures and laws on new seeds, with a corpus of failing cases.

Most of the time goes to signatures: hundreds of batches each, which the same compiled kernels serve
(`cases/signatures.py`). The rest goes to the other laws, each on a new seed. The corpus is the
folder that stores what was tried and what failed. The next run tries the failures first, and then
what has not been tried.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from hypothesis.strategies import SearchStrategy

from ..base.results import Result, Status
from ..cases.signatures import VERSION
from ..laws.law import Law
from ..reports.report import Report
from ..running.again import try_symptoms_again
from ..running.gpus import check_workers, gpus_of_workers
from ..running.poison import explain_nans
from ..running.worker import SECONDS_OF_A_LAW, Job, Worker, signatures_on
from .check import choose_device, choose_laws
from .corpus import CORPUS, Corpus, Line, check_numbers

AREA = "signatures"
"""Area of the laws that are tried on many batches of one signature."""
FIRST = "repeated_calls"
"""Area of the laws that are tried before all others: a batch of a signature is called once only."""
BATCHES = 256
"""Batches of a signature, by default."""
BATCHES_AT_ONCE = 32
"""Batches of a job: what is lost if a run is ended by force. On CUDA eight times as many."""
SHARE_OF_LAWS = 0.1
"""Share of the time that the other laws get."""
RIGHT = (Status.HELD, Status.OUTSIDE)
"""Statuses of a stored case that no longer fails. One that is not finished may still fail."""
ALIKE = 3
"""Signatures that may fail alike before the law is not tried on further ones."""
SECONDS_AGAIN = 120.0
"""Time limit of the failing inputs that are tried again in fresh processes."""
UNEXPLAINED = 4
"""Failures with NaN whose cause is searched."""


@dataclass
class Fuzzing:
    """The result of a fuzzing run.

    Args:
        implementation: The implementation that was tried.
        device: The device of its tensors.
        cases: Number of cases that were tried, without those of the corpus.
        signatures: Number of signatures that batches were drawn from.
        seconds: Duration in seconds, without the cases of the corpus.
        failures: One result per symptom, the most severe first.
        fixed: Laws whose case in the corpus no longer breaks them.
        missing: Laws that need an operation that the implementation does not have.
        programs: Files that reproduce the failures.
        report: The results of this run by law, for the files of a report.
        summary: Counts of all that was tried in all runs on this corpus.
    """

    implementation: str
    device: str
    cases: int = 0
    signatures: int = 0
    seconds: float = 0.0
    failures: list[Result] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    programs: list[Path] = field(default_factory=list)
    report: Report | None = None
    summary: dict[str, Any] = field(default_factory=dict)


def fuzz_implementation(
    implementation: str,
    minutes: float,
    corpus: Path = CORPUS,
    only: str | None = None,
    examples: int = 50,
    device: str | None = None,
    seconds_of_a_law: float = SECONDS_OF_A_LAW,
    on_result: Callable[[Fuzzing, Result], None] = lambda run, result: None,
    workers: int = 1,
    batches: int = BATCHES,
    cases: int | None = None,
) -> Fuzzing:
    """Return the result of trying new cases for some minutes.

    Args:
        implementation: As in `check_implementation`.
        minutes: Time limit. It also stops the jobs that are running. Cases of the corpus are tried
            first, all of them, and their time is not counted.
        corpus: Folder of what was tried and what failed. It is modified, and created if it does
            not exist.
        only: Optional. Words that the sentence or the area of a law must contain. If None, all
            laws are tried.
        examples: Number of drawn cases per law and seed.
        device: Optional. The device of the tensors. If None, CUDA if it is available, else the
            CPU. Several workers on "cuda" are distributed over all visible GPUs; those on
            "cuda:1" use the second one.
        seconds_of_a_law: Time limit of a job. Its cases until then count.
        on_result: Called with the run so far and the result of a job, by one thread at a time.
        workers: Number of processes.
        batches: Number of batches per signature.
        cases: Optional. The run ends after this number of new cases. If None, only the time ends
            it.

    Raises:
        ModuleNotFoundError, ImportError: The implementation does not exist or cannot be imported.
        ValueError: The implementation has none of the operations, no law contains the words, the
            corpus cannot be read, or a number is out of range.
        PermissionError, NotADirectoryError: The corpus cannot be written.
    """
    check_workers(workers)
    check_numbers(minutes, examples=examples, batches=batches, cases=cases)
    laws = choose_laws(only)
    device = choose_device(device)
    run = Fuzzing(implementation, device)
    stored = Corpus(corpus, implementation)
    with ExitStack() as ended:
        processes = []
        for gpu in gpus_of_workers(device, workers):
            worker = Worker(implementation, device, seconds_of_a_law, gpu=gpu)
            processes.append(worker)
            ended.callback(processes[-1].stop)
        processes[0].start()
        seen = _try_stored(run, stored, laws, processes[0], on_result)
        began = time.monotonic()
        deadline = began + 60 * minutes
        drawing = _Drawing(laws, stored, seen, examples, batches, cases, device)
        try:
            with ThreadPoolExecutor(workers) as pool:
                loops = [
                    pool.submit(_work, process, drawing, run, deadline, on_result)
                    for process in processes
                ]
                try:
                    for loop in loops:
                        loop.result()
                except BaseException:
                    drawing.stop()
                    for process in processes:
                        process.stop()
                    raise
        finally:
            run.seconds = time.monotonic() - began
            _finish(run, stored, laws, drawing, seen)
    return run


def _try_stored(
    run: Fuzzing,
    stored: Corpus,
    laws: Sequence[Law],
    worker: Worker,
    on_result: Callable[[Fuzzing, Result], None],
) -> list[Result]:
    """Try the cases of the corpus, and return those that still fail or were not tried."""
    by_name = {law.name: law for law in laws}
    still = []
    for failure in stored.failures:
        if failure.law not in by_name or not failure.case:
            still.append(failure)  # excluded by `only`, and kept in the corpus
            continue
        job = Job(failure.law, case=failure.case)
        result = worker.try_law(job, by_name[failure.law].area)
        if result.status in RIGHT:
            # a failure that depends on earlier calls may come back in a fresh process
            worker.stop()
            result = worker.try_law(job, by_name[failure.law].area)
        if result.status in RIGHT:
            run.fixed.append(failure.law)
        else:
            still.append(failure if result.ok else result)
        on_result(run, result)
    return still


class _Drawing:
    """Selects the next job: batches of a signature, or a law on a new seed.

    Args:
        laws: The laws to try.
        corpus: What was tried in earlier runs.
        failures: Failures of the corpus.
        examples, batches, cases: As in `fuzz_implementation`.
        device: The device of the tensors.
    """

    def __init__(
        self,
        laws: Sequence[Law],
        corpus: Corpus,
        failures: Sequence[Result],
        examples: int,
        batches: int,
        cases: int | None,
        device: str,
    ) -> None:
        self.lock = Lock()
        self.corpus, self.device = corpus, device
        self.examples, self.batches, self.left = examples, batches, cases
        self.signed = [law for law in laws if law.area == AREA]
        others = [law for law in laws if law.area != AREA]
        self.others = sorted(others, key=lambda law: law.area != FIRST)
        self.tried = corpus.tried_batches()
        self.seeds = corpus.next_seeds()
        self.failures = list(failures)
        self.closed = {failure.law for failure in failures}
        self.broken = {
            signature
            for signature in corpus.broken_signatures()
            if signature[0] in self.closed
        }
        self.unit = 0
        self.at_law = 0
        self.spent = {"laws": 0.0, "signatures": 0.0}
        self.results: dict[str, Result] = {}
        self.missing: set[str] = set()

    def stop(self) -> None:
        """Give no more jobs."""
        with self.lock:
            self.signed, self.others = [], []

    def next_law(self) -> tuple[Law, Job] | None:
        """Return the next law on a new seed, or None if the laws have had their share of time."""
        with self.lock:
            total = self.spent["laws"] + self.spent["signatures"]
            is_due = self.spent["laws"] <= SHARE_OF_LAWS * total
            is_due |= self.at_law < sum(law.area == FIRST for law in self.others)
            if self.signed and not is_due:
                return None
            for _ in range(len(self.others)):
                law = self.others[self.at_law % len(self.others)]
                self.at_law += 1
                seed = self.seeds.get(law.name, 0)
                drawn = isinstance(law.cases, SearchStrategy)
                if law.name in self.closed or (seed and not drawn):
                    continue  # a list of cases is the same for every seed
                if (
                    not (count := self._reserve(self.examples if drawn else 0))
                    and drawn
                ):
                    return None
                self.seeds[law.name] = seed + 1
                return law, Job(law.name, seed, count, signatures_on(self.device))
            return None

    def next_signature(self) -> tuple[Law, int] | None:
        """Return a law and the seed of the next signature with batches that were not tried."""
        with self.lock:
            while self.signed and self.left != 0:
                law = self.signed[self.unit % len(self.signed)]
                key = law.name, self.unit // len(self.signed)
                self.unit += 1
                if key not in self.broken and self.tried.get(key, 0) < self.batches:
                    return law, key[1]
            return None

    def next_batches(self, law: Law, seed: int) -> Job | None:
        """Return the next batches of a signature, or None if all were tried or failed."""
        with self.lock:
            first = self.tried.get((law.name, seed), 0)
            at_once = BATCHES_AT_ONCE * (1 if self.device == "cpu" else 8)
            if (law.name, seed) in self.broken or law not in self.signed:
                return None
            count = self._reserve(min(at_once, self.batches - first))
            return Job(law.name, first, count, signature=seed) if count else None

    def _reserve(self, count: int) -> int:
        if self.left is None:
            return max(count, 0)
        count = max(0, min(count, self.left))
        self.left -= count
        return count

    def end(self, law: Law, job: Job, result: Result, is_cut: bool) -> int:
        """Store the result of a job, and return how many cases it tried.

        A job that the time limit has stopped does not count: the next run tries it.
        """
        with self.lock:
            kind = "laws" if job.signature is None else "signatures"
            self.spent[kind] += result.seconds
            is_listed = not isinstance(law.cases, SearchStrategy)
            if self.left is not None and not is_listed:
                self.left += job.examples - (0 if is_cut else result.cases)
            if is_cut:
                return 0
            if result.status == Status.MISSING:
                self.missing.add(law.name)
            if not result.cases:
                self._close(law)
            self._count(result)
            if result.status == Status.MISSING or not result.cases:
                return 0
            details = {k: v for k, v in result.details.items() if k != "picture"}
            self.corpus.append(
                Line(
                    law.name,
                    job.signature,
                    job.seed,
                    result.cases,
                    result.skipped,
                    result.seconds,
                    str(result.status),
                    self.device,
                    details,
                    VERSION,
                )
            )
            if job.signature is not None:
                key = law.name, job.signature
                self.tried[key] = job.seed + result.cases
            if result.ok:
                return result.cases
            self.failures.append(result)
            alike = [
                failure
                for failure in self.failures
                if (failure.law, failure.symptom) == (result.law, result.symptom)
            ]
            if job.signature is None:
                self.closed.add(law.name)
            else:
                self.broken.add((law.name, job.signature))
                if len(alike) >= ALIKE:
                    self._close(law)
            return result.cases

    def _close(self, law: Law) -> None:
        self.closed.add(law.name)
        self.signed = [other for other in self.signed if other is not law]

    def _count(self, result: Result) -> None:
        """Add a result to those of its law in this run."""
        before = self.results.get(result.law)
        if before is None:
            self.results[result.law] = result
            return
        latest = result if before.ok else before
        self.results[result.law] = replace(
            latest,
            cases=before.cases + result.cases,
            skipped=before.skipped + result.skipped,
            seconds=round(before.seconds + result.seconds, 2),
        )


def _work(
    worker: Worker,
    drawing: _Drawing,
    run: Fuzzing,
    deadline: float,
    on_result: Callable[[Fuzzing, Result], None],
) -> None:
    """Try jobs in one process until the deadline, or until none is left."""
    worker.deadline = deadline

    def try_job(law: Law, job: Job) -> None:
        result = worker.try_law(job, law.area)
        is_late = time.monotonic() >= deadline
        is_cut = is_late and result.status == Status.UNFINISHED
        if is_cut and job.signature is not None and result.details:
            # batches are tried one by one: those that were tried have held
            result, is_cut = replace(result, status=Status.HELD), False
        cases = drawing.end(law, job, result, is_cut)
        with drawing.lock:
            run.cases += cases
            on_result(run, result)

    while time.monotonic() < deadline:
        due = drawing.next_law()
        if due is not None:
            try_job(*due)
            continue
        unit = drawing.next_signature()
        if unit is None:
            return
        with drawing.lock:
            run.signatures += 1
        while time.monotonic() < deadline:
            job = drawing.next_batches(*unit)
            if job is None:
                break
            try_job(unit[0], job)


def _finish(
    run: Fuzzing,
    stored: Corpus,
    laws: Sequence[Law],
    drawing: _Drawing,
    still: Sequence[Result],
) -> None:
    """Write the corpus, and the results into the run.

    Args:
        run: The run. It is modified.
        stored: The corpus.
        laws: The laws of the run.
        drawing: What was tried.
        still: The failures of the corpus that still fail or were not tried, which are the first
            ones of `drawing`.
    """
    new = drawing.failures[len(still) :]
    found = [*still]
    if new:
        worker = Worker(run.implementation, run.device, SECONDS_OF_A_LAW)
        found += try_symptoms_again(worker, new, SECONDS_AGAIN)
    failures = []
    for number, result in enumerate(found):
        if number < UNEXPLAINED and not result.cause:
            (result,) = explain_nans(run.implementation, run.device, [result])
        failures.append(result)
    everything = Report(run.implementation, run.device, tuple(failures))
    run.failures = [symptom.first for symptom in everything.symptoms()]
    # what is stored stays while it fails, also if another failure is like it now
    stay = [*run.failures, *failures[: len(still)]]
    kept = {(failure.law, failure.case, failure.symptom): failure for failure in stay}
    broken = {failure.law for failure in run.failures}
    held = [
        drawing.results[law.name]
        for law in laws
        if law.name in drawing.results and law.name not in broken
    ]
    run.report = Report(
        run.implementation,
        run.device,
        (*(result for result in held if result.ok), *run.failures),
        {"cases": run.cases, "signatures": run.signatures},
    )
    run.missing = [law.name for law in laws if law.name in drawing.missing]
    run.programs = stored.write(run.report, list(kept.values()))
    run.summary = stored.summary()
