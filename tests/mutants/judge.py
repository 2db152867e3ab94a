"""Does the suite find a mutant broken?

Each mutant is tried in a process forked for it, so that one that writes where it should not, hangs
or crashes takes nobody along. The case that killed it in the last run comes first, and then that
law. The others come in the order of how near they are to the changed file, first each with a few of
its cases, then each with all; where few break it, all are tried at once. The first that breaks on
all of them ends it. Nothing else judges: no test of this repository, and the truth stays the real
reference.
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
from pagetwin.conformance.harness import trial as trying
from pagetwin.conformance.harness.candidate import load_candidate
from pagetwin.conformance.harness.interpreter import speed_up
from pagetwin.conformance.harness.law import Law, Setting
from pagetwin.conformance.harness.report import Result, Status

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


@dataclass
class Trial:
    """One twin, changed or not, and what became of it.

    Args:
        twin: "reference" or "optimized".
        laws: what it is asked, in that order.
        mutant: the change, at whose first broken law the trial ends; None: there is none, and
            it goes on.
        replays: laws with a case that each is tried on before all others.
        first: words of the law that is tried on all its cases before the others; empty: none.
        is_short: whether each law is tried on few cases only.
        broken: the sentences of the laws that broke.
        cases: the cases that broke them, as Python.
        how: "broken", "crashed" or "hung"; empty if no law broke.
        what: what was wrong, in a line.
        seconds: how long it took, its process included.
        seconds_of: how long each law took that held.
        limit: seconds after which the trial ends, if no law broke by then.
        is_cut: whether it ended at that limit.
    """

    twin: str
    laws: Sequence[Law]
    mutant: Mutant | None = None
    replays: Sequence[tuple[Law, str]] = ()
    first: str = ""
    is_short: bool = False
    broken: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    how: str = ""
    what: str = ""
    seconds: float = 0.0
    seconds_of: dict[str, float] = field(default_factory=dict)
    limit: float = math.inf
    is_cut: bool = False


def judge(
    trials: Iterable[Trial],
    workers: int,
    examples: int,
    usual: Mapping[str, float] | None = None,
) -> Iterator[Trial]:
    """Yield the trials as they end.

    Args:
        trials: what is to be tried.
        workers: processes at a time.
        examples: drawn cases of a law.
        usual: how long each law takes on the unchanged twin, USUAL if it lacks the law; None:
            nothing hangs.
    """
    speed_up()
    trials = list(trials)
    yield from (each for each in trials if not (each.laws or each.replays))
    waiting = deque(each for each in trials if each.laws or each.replays)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_Running(waiting.popleft(), examples, usual))
        limit = min(each.next_limit for each in running) - time.monotonic()
        wait([each.reports for each in running], timeout=max(0.0, limit))
        for each in list(running):
            if each.has_ended():
                running.remove(each)
                yield each.trial


class _Running:
    """A trial in its process."""

    def __init__(
        self, trial: Trial, examples: int, usual: Mapping[str, float] | None
    ) -> None:
        self.trial = trial
        self.usual = usual
        self.begin = time.monotonic()
        self.law, self.case = "", ""
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
        self.deadline = time.monotonic() + usual

    @property
    def next_limit(self) -> float:
        """The time at which the law counts as hanging, or the trial is cut, if that is earlier."""
        return min(self.deadline, self.begin + self.trial.limit)

    def has_ended(self) -> bool:
        """Read what there is to read, and tell whether that was all."""
        trial = self.trial
        try:
            while self.reports.poll():
                report: dict[str, Any] = self.reports.recv()
                if "raised" in report:
                    raise RuntimeError(report["raised"])
                if "begins" in report:
                    self.law, self.case = report["begins"], ""
                    self._set_deadline()
                elif "case" in report:
                    self.case = report["case"]
                elif report.get("broke"):
                    trial.broken.append(self.law)
                    trial.cases.append(self.case)
                    trial.how, trial.what = "broken", report["what"]
                elif "seconds" in report:
                    trial.seconds_of[self.law] = report["seconds"]
                if report.get("last"):
                    return self._end()
        except EOFError:
            return self._end("crashed")
        if time.monotonic() > self.deadline:
            return self._end("hung")
        if time.monotonic() > self.begin + trial.limit:
            trial.is_cut = True
            return self._end()
        return False

    def _end(self, how: str = "") -> bool:
        self.process.kill()
        self.process.join()
        if how:
            self.trial.broken.append(self.law)
            self.trial.cases.append(self.case)
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
    # nobody reads the smallest input
    trying.SECONDS_TO_SHRINK = 0.0
    generate_only = settings(phases=[Phase.explicit, Phase.generate])
    settings.register_profile("mutants", generate_only)
    settings.load_profile("mutants")
    warnings.simplefilter("ignore")  # of the interpreter, about numbers that overflow
    if not _replay(reports, trial, setting):
        laws: Iterable[Law] = trial.laws
        if trial.mutant is not None:
            laws = _telling_first(reports, trial, setting)
        for law in laws:
            reports.send({"begins": law.name})
            result = trying.try_law(law, setting, 0, examples, _tell(reports))
            if _has_ended(reports, trial, result):
                return
    reports.send({"last": True})


def _tell(reports: Connection) -> trying.At:
    """Return a function that reports each case before it is tried: one may end the process."""
    return lambda case, held: reports.send({"case": case})


def _replay(reports: Connection, trial: Trial, setting: Setting) -> bool:
    """Try laws on one case each, and return whether the trial has ended."""
    for law, case in trial.replays:
        reports.send({"begins": law.name})
        try:
            trying.make_case(law, case)
        except Exception:  # a case of another version of the law
            continue
        result = trying.try_case(law, setting, case, _tell(reports), is_exact=True)
        if _has_ended(reports, trial, result):
            return True
    return False


def _has_ended(reports: Connection, trial: Trial, result: Result) -> bool:
    """Report the result of a law, and return whether it ends the trial."""
    broke = result.status == Status.BROKEN
    ends = broke and trial.mutant is not None
    what = result.message or f"{result.what}, {result.where}"
    if broke:
        reports.send({"case": result.case})
    reports.send(
        {"broke": broke, "what": what, "seconds": result.seconds, "last": ends}
    )
    return ends


def _telling_first(
    reports: Connection, trial: Trial, setting: Setting
) -> Iterator[Law]:
    """Yield laws as they break on few cases, and then the others, unless the trial is short.

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
        few = trying.try_law(replace(law, cases=cases), setting, 0, FEW, _tell(reports))
        if few.status == Status.BROKEN:
            yield law
        elif not is_whole and not trial.is_short:
            others.append((few.seconds, place, law))
    for _, _, law in sorted(others, key=lambda each: each[:2]):
        yield law
