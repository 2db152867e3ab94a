"""Does the suite find a mutant broken?

Each mutant is tried in a process forked for it, so that one that writes where it should not, hangs
or crashes takes nobody along. The laws come in the order of how near they are to the changed file,
first each with a few of its cases, then each with all; where few break it, all are tried at once.
The first that breaks on all of them ends it. Nothing else judges: no test of this repository, and
the truth stays the real reference.
"""

import ast
import math
import multiprocessing
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
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
from pagetwin.conformance.harness.report import Status
from pagetwin.contract.operations import CONCEPTS

from .graft import graft
from .mutant import PACKAGES, ROOT, Mutant

SECONDS = 20.0
"""What one law may take before it counts as hanging; as much and thrice what it takes on the
unchanged twin, where that is known."""

SLOW = 5.0
"""A law that takes longer on an unchanged twin is asked after its neighbours."""

BACKENDS = "backends.backend"
"""The file of what no concept names: the backends."""

FEW = 1
"""Cases of a law that are tried before all cases of the others."""

SECONDS_UNCHANGED = 600.0
"""What one law may take on the unchanged twin."""


@dataclass
class Trial:
    """One twin, changed or not, and what became of it.

    Args:
        twin: "reference" or "optimized".
        laws: what it is asked, in that order.
        mutant: the change, at whose first broken law the trial ends; None: there is none, and
            it goes on.
        broken: the sentences of the laws that broke.
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
    broken: list[str] = field(default_factory=list)
    how: str = ""
    what: str = ""
    seconds: float = 0.0
    seconds_of: dict[str, float] = field(default_factory=dict)
    limit: float = math.inf
    is_cut: bool = False


def laws_near(
    mutant: Mutant, laws: Iterable[Law], usual: Mapping[str, float]
) -> list[Law]:
    """Return the laws that can notice a change, those first whose operations are nearest to it.

    A law whose operations do not import the changed file, directly or not, cannot. Of those that
    are as near the slow ones come last. Where a law is named in the catalogue, it is the first.
    """
    steps = _steps_to(mutant.twin, f"{mutant.package}.{mutant.module}")
    home = {
        name: f"{'bookkeeping' if each.is_single else mutant.twin}.{each.module}"
        for each in CONCEPTS
        for name in each.operations
    }
    backends = f"{mutant.twin}.{BACKENDS}"

    def distance(law: Law) -> float:
        # what no concept has is the backends
        found = [steps.get(home.get(need, backends), math.inf) for need in law.needs]
        # a law that names no operation looks at more than one
        return min(found, default=len(steps))

    def rank(law: Law) -> tuple[bool, float, bool]:
        is_named = bool(mutant.ask_first) and mutant.ask_first in law.name
        return not is_named, distance(law), usual.get(law.name, 0.0) > SLOW

    return sorted((law for law in laws if distance(law) < math.inf), key=rank)


@cache
def _steps_to(twin: str, module: str) -> dict[str, int]:
    """Return the number of imports between each module of a twin and one module.

    The modules of `bookkeeping` count as the twin's: "bookkeeping.cache.kv_cache".
    """
    imports: dict[str, set[str]] = {}
    for package in (twin, "bookkeeping"):
        folder = ROOT / PACKAGES[package]
        for path in folder.rglob("*.py"):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            # `__init__.py` is the package itself
            own = parts[:-1] if parts[-1] == "__init__" else parts
            text = path.read_text(encoding="utf-8")
            imports[".".join(own)] = {
                ".".join(
                    [
                        *parts[: len(parts) - node.level],
                        *(part for part in more if part),
                    ]
                )
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and 1 <= node.level <= len(parts)
                # `from . import kernel` names a module, `from .kernel import name` a
                # name in one
                for more in [
                    (node.module,),
                    *((node.module, each.name) for each in node.names),
                ]
            }
            if "import_option_files(__name__" in text:
                imports[".".join(own)] |= {
                    ".".join([*own, each.stem]) for each in path.parent.glob("*.py")
                }
    steps, frontier = {module: 0}, deque([module])
    while frontier:
        reached = frontier.popleft()
        for name, imported in imports.items():
            if reached in imported and name not in steps:
                steps[name] = steps[reached] + 1
                frontier.append(name)
    return steps


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
        usual: how long each law takes on the unchanged twin; None: nothing hangs.
    """
    speed_up()
    trials = list(trials)
    yield from (trial for trial in trials if not trial.laws)
    waiting, running = deque(trial for trial in trials if trial.laws), []
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
        self.place = -1
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
            law = self.trial.laws[max(self.place, 0)].name
            usual = SECONDS + 3 * self.usual.get(law, 0.0)
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
                    self.place = report["begins"]
                    self._set_deadline()
                elif report.get("broke"):
                    trial.broken.append(trial.laws[self.place].name)
                    trial.how, trial.what = "broken", report["what"]
                elif "seconds" in report:
                    law = trial.laws[self.place].name
                    trial.seconds_of[law] = report["seconds"]
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
            self.trial.broken.append(self.trial.laws[max(self.place, 0)].name)
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
    laws: Iterable[tuple[int, Law]] = enumerate(trial.laws)
    if trial.mutant is not None:
        laws = _telling_first(reports, trial, setting)
    for place, law in laws:
        reports.send({"begins": place})
        result = trying.try_law(law, setting, 0, examples)
        broke = result.status == Status.BROKEN
        last = broke and trial.mutant is not None
        what = result.message or f"{result.what}, {result.where}"
        reports.send(
            {"broke": broke, "what": what, "seconds": result.seconds, "last": last}
        )
        if last:
            return
    reports.send({"last": True})


def _telling_first(
    reports: Connection, trial: Trial, setting: Setting
) -> Iterator[tuple[int, Law]]:
    """Yield laws and where they stand: as they break on few cases, and then the others.

    Many laws take seconds, and most mutants break one of them at once. Of the others those come
    first that took the least.
    """
    others: list[tuple[float, int, Law]] = []
    assert trial.mutant is not None
    for place, law in enumerate(trial.laws):
        if trial.mutant.ask_first and trial.mutant.ask_first in law.name:
            yield place, law
            continue
        reports.send({"begins": place})
        cases, is_whole = law.cases, False
        if not isinstance(cases, SearchStrategy):
            is_whole = len(cases) <= FEW
            # the first ones are the plainest
            cases = cases[len(cases) // 2 :][:FEW]
        few = trying.try_law(replace(law, cases=cases), setting, 0, FEW)
        if few.status == Status.BROKEN:
            yield place, law
        elif not is_whole:
            others.append((few.seconds, place, law))
    for _, place, law in sorted(others, key=lambda each: each[0]):
        yield place, law
