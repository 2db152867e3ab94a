"""Does the suite find a mutant broken?

Each mutant is tried in a process forked for it, so that one that writes where it should not, hangs
or crashes ends no other one. One that hangs is tried again when nothing else runs, with four times
the time: under load a law that has nothing to do with the change takes too long. The law that
killed it in the last run comes first. The others come in the order of how near they are to the
changed file, first each with a few of its cases, then each with all; where few break it, all are
tried at once. The first that breaks on all of them ends it. Nothing else judges: no test of this
repository, and the truth stays the real reference.
"""

import math
import multiprocessing
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running import trial as trying
from pagetwin.conformance.running.interpreter import speed_up

from .graft import graft
from .mutant import Mutant

SECONDS = 20.0
"""What one law may take before it counts as hanging; as much and thrice what it takes on the
unchanged twin, where that is known."""

FEW = 1
"""Cases of a law that are tried before all cases of the others."""

SECONDS_UNCHANGED = 600.0
"""What one law may take on the unchanged twin."""

USUAL = 60.0
"""What a law may take on the unchanged twin, where its own time is not known. On a free core no law
takes over 15 s; a mutant must not count as hanging because other processes use the cores."""


PATIENCE = 4.0
"""Factor of the time of a trial that hung, when it is tried again alone."""


OUTCOME_OF = {"": "alive", "broken": "killed", "crashed": "crashes", "hung": "hangs"}
"""How a mutant ended, by what became of its trial."""


@dataclass
class Trial:
    """One twin, changed or not, and what became of it.

    Args:
        twin: "reference" or "optimized".
        laws: what it is asked, in that order.
        mutant: the change, at whose first broken law the trial ends. If None, nothing is changed,
            and it goes on.
        first: words of the law that is tried on all its cases before the others; empty: none.
        broken: the sentences of the laws that broke.
        how: "broken", "crashed" or "hung"; empty if no law broke.
        what: what was wrong, in a line.
        seconds: how long it took, its process included.
        seconds_of: how long each law took that held.
        limit: seconds after which the trial ends, if no law broke by then.
    """

    twin: str
    laws: Sequence[Law]
    mutant: Mutant | None = None
    first: str = ""
    broken: list[str] = field(default_factory=list)
    how: str = ""
    what: str = ""
    seconds: float = 0.0
    seconds_of: dict[str, float] = field(default_factory=dict)
    limit: float = math.inf

    def anew(self) -> "Trial":
        """Return the same trial before it began."""
        what = {"twin", "laws", "mutant", "first", "limit"}
        return Trial(**{name: getattr(self, name) for name in what})


def judge(
    trials: Iterable[Trial],
    workers: int,
    examples: int,
    usual: Mapping[str, float] | None = None,
) -> Iterator[Trial]:
    """Yield the trials as they end; those that hung are tried again alone, and yielded then.

    Args:
        trials: what is to be tried.
        workers: processes at a time.
        examples: drawn cases of a law.
        usual: how long each law takes on the unchanged twin, USUAL if it lacks the law. If None,
            nothing hangs.
    """
    speed_up()
    trials = list(trials)
    yield from (trial for trial in trials if not trial.laws)
    asked = [trial for trial in trials if trial.laws]
    hung = []
    for trial in _run(asked, workers, examples, usual, 1.0):
        if trial.how == "hung":
            hung.append(trial.anew())
        else:
            yield trial
    yield from _run(hung, 1, examples, usual, PATIENCE)


def _run(
    trials: Iterable[Trial],
    workers: int,
    examples: int,
    usual: Mapping[str, float] | None,
    patience: float,
) -> Iterator[Trial]:
    """Yield trials as they end, each in a process of its own.

    Args:
        trials, workers, examples, usual: As for `judge`.
        patience: Factor of the time of each law and of the limit of a trial.
    """
    waiting = deque(trials)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_Running(waiting.popleft(), examples, usual, patience))
        limit = min(process.next_limit for process in running) - time.monotonic()
        wait([process.reports for process in running], timeout=max(0.0, limit))
        for process in list(running):
            if process.has_ended():
                running.remove(process)
                yield process.trial


class _Running:
    """A trial in its process."""

    def __init__(
        self,
        trial: Trial,
        examples: int,
        usual: Mapping[str, float] | None,
        patience: float,
    ) -> None:
        self.trial = trial
        self.usual, self.patience = usual, patience
        self.begin = time.monotonic()
        self.law = ""
        self.folder = tempfile.TemporaryDirectory()
        self.reports, theirs = multiprocessing.Pipe(duplex=False)
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(
            target=_try_laws,
            args=(theirs, trial, Path(self.folder.name), examples),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self._set_deadline()

    def _set_deadline(self) -> None:
        usual = SECONDS_UNCHANGED
        if self.usual is not None:
            usual = SECONDS + 3 * self.usual.get(self.law, USUAL)
        self.deadline = time.monotonic() + self.patience * usual

    @property
    def next_limit(self) -> float:
        """The time at which the law counts as hanging, or the trial is cut, if that is earlier."""
        return min(self.deadline, self.begin + self.patience * self.trial.limit)

    def has_ended(self) -> bool:
        """Read what there is to read, and tell whether that was all."""
        trial = self.trial
        try:
            while self.reports.poll():
                report: dict[str, Any] = self.reports.recv()
                if "raised" in report:
                    raise RuntimeError(report["raised"])
                if "begins" in report:
                    self.law = report["begins"]
                    self._set_deadline()
                elif report.get("broke"):
                    trial.broken.append(self.law)
                    trial.how, trial.what = "broken", report["what"]
                elif "seconds" in report:
                    trial.seconds_of[self.law] = report["seconds"]
                if report.get("last"):
                    return self._end()
        except EOFError:
            return self._end("crashed")
        if time.monotonic() > self.deadline:
            return self._end("hung")
        if time.monotonic() > self.begin + self.patience * trial.limit:
            return self._end()
        return False

    def _end(self, how: str = "") -> bool:
        self.process.kill()
        self.process.join()
        if how:
            self.trial.broken.append(self.law)
            self.trial.how = how
            self.trial.what = f"the process {how}"
        self.trial.seconds = time.monotonic() - self.begin
        self.folder.cleanup()
        return True


def _try_laws(reports: Connection, trial: Trial, folder: Path, examples: int) -> None:
    """Try laws one after another, in a process of its own, until one breaks."""
    try:
        setting = trying.make_setting(
            load_candidate(graft(trial.twin, trial.mutant, folder)), "cpu"
        )
    except BaseException as error:
        reports.send({"raised": f"{trial.mutant}: {type(error).__name__}: {error}"})
        return
    # the smallest input is not read
    trying.SECONDS_TO_SHRINK = 0.0
    generate_only = settings(phases=[Phase.explicit, Phase.generate])
    settings.register_profile("mutants", generate_only)
    settings.load_profile("mutants")
    warnings.simplefilter("ignore")  # of the interpreter, about numbers that overflow
    laws: Iterable[Law] = trial.laws
    if trial.mutant is not None:
        laws = _telling_first(reports, trial, setting)
    for law in laws:
        reports.send({"begins": law.name})
        if _has_ended(reports, trial, trying.try_law(law, setting, 0, examples)):
            return
    reports.send({"last": True})


def _has_ended(reports: Connection, trial: Trial, result: Result) -> bool:
    """Report the result of a law, and return whether it ends the trial."""
    broke = result.status == Status.BROKEN
    ends = broke and trial.mutant is not None
    what = result.message or f"{result.what}, {result.where}"
    reports.send(
        {"broke": broke, "what": what, "seconds": result.seconds, "last": ends}
    )
    return ends


def _telling_first(
    reports: Connection, trial: Trial, setting: Setting
) -> Iterator[Law]:
    """Yield laws as they break on few cases, and then the others.

    Many laws take seconds, and most mutants break one of them at once. Of the others those come
    first that took the least.
    """
    others: list[tuple[float, int, Law]] = []
    for place, law in enumerate(trial.laws):
        if trial.first and trial.first in law.name:
            yield law
            continue
        reports.send({"begins": law.name})
        cases, is_whole = law.cases, False
        if not isinstance(cases, SearchStrategy):
            is_whole = len(cases) <= FEW
            # the first ones are the plainest
            cases = cases[len(cases) // 2 :][:FEW]
        few = trying.try_law(replace(law, cases=cases), setting, 0, FEW)
        if few.status == Status.BROKEN:
            yield law
        elif not is_whole:
            others.append((few.seconds, place, law))
    for _, _, law in sorted(others, key=lambda entry: entry[:2]):
        yield law
