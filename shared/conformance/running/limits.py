"""Limits of a check: the time of laws and cases, laws that are not tried, and a missing GPU.

An implementation that ends every process would otherwise start a process per law. That takes
minutes, and shows nothing new. One whose first case takes longer than a law may would take the time
limit per law.
"""

import math
import re
import time
from collections import Counter
from typing import Protocol

from ..base.results import Result, Status
from .worker import FATAL, Job, Worker

SMALLEST_LAW = "every new token attends to its sequence up to itself"
SMALLEST_CASE = "BatchPlan((1,), (1,))"
NEEDS_GPU = re.compile(r"cuda|gpu|nvidia|cpu tensor|active drivers", re.IGNORECASE)
"""Words in the errors of kernels that cannot run on a CPU."""
SECONDS_AFTER = 30.0
"""Time for the search for causes of NaN after laws whose time is over."""


class TimeLimits:
    """Time limits of a check.

    Args:
        law: Seconds per law.
        case: Seconds per case.
        minutes: Optional. Time limit of all laws. If None, there is none.

    Raises:
        ValueError: A limit is not positive.
    """

    def __init__(self, law: float, case: float, minutes: float | None) -> None:
        for name, limit in (("law", law), ("case", case), ("minutes", minutes)):
            if limit is not None and not limit > 0:
                name = name if name == "minutes" else f"seconds_of_a_{name}"
                raise ValueError(f"{name} = {limit:g}: expected more than 0")
        self.law, self.case, self.minutes = law, case, minutes
        self.deadline = math.inf
        """Time of `time.monotonic` at which the time of all laws is over."""

    def begin(self) -> None:
        """Start the time of all laws."""
        if self.minutes is not None:
            self.deadline = time.monotonic() + 60 * self.minutes

    @property
    def left(self) -> float:
        """Seconds for what comes after the laws."""
        return max(SECONDS_AFTER, self.deadline - time.monotonic())

    @property
    def of_a_law(self) -> float:
        """Seconds of a law that begins now."""
        return max(0.0, min(self.law, self.deadline - time.monotonic()))


ENDINGS = 3
"""Laws that may end a process at their first call before others of their operations are not
tried."""


class NeedyLaw(Protocol):
    """What is known of a law before it is tried."""

    @property
    def name(self) -> str:
        """Its sentence."""

    @property
    def area(self) -> str:
        """Its subject."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Operations that it needs."""


class Endings:
    """Laws that ended a process at their first call, by the operations that they need."""

    def __init__(self) -> None:
        self._fatal: Counter[frozenset[str]] = Counter()
        self._unfinished: Counter[frozenset[str]] = Counter()
        self._judged: set[frozenset[str]] = set()

    def note(self, law: NeedyLaw, result: Result, failed_at_once: bool) -> None:
        """Note how a law ended.

        Args:
            law: The law.
            result: Its result.
            failed_at_once: As in `Worker`.
        """
        key = frozenset(law.needs)
        if result.status not in FATAL:
            if result.cases > result.skipped:
                self._judged.add(key)
            elif result.status == Status.UNFINISHED and result.case:
                self._unfinished[key] += 1
        elif failed_at_once:
            self._fatal[key] += 1

    def untried(self, law: NeedyLaw) -> Result | None:
        """Return the result of a law that is not tried, or None if it is to be tried."""
        for counts, status, words in (
            (self._fatal, Status.NOT_TRIED, "ended the process at their first call"),
            (self._unfinished, Status.UNFINISHED, "did not end their first case"),
        ):
            for key, count in list(counts.items()):
                # a law that needs no operation by name tries all of them
                is_judged = key in self._judged if law.needs else bool(self._judged)
                is_about = not law.needs or key <= set(law.needs)
                if count < ENDINGS or is_judged or not is_about:
                    continue
                reason = f"{ENDINGS} laws of {', '.join(sorted(key))} {words}"
                return Result(law.name, law.area, status, reason=reason)
        return None


def check_needs_no_gpu(worker: Worker) -> None:
    """Raise if attention on one key raises an error that says that a GPU is needed.

    Without this check every law would be reported as broken.
    """
    result = worker.try_law(Job(SMALLEST_LAW, case=SMALLEST_CASE), "attention")
    if not result.ok and NEEDS_GPU.search(result.message):
        raise ValueError(
            f"device = 'cpu': {worker.implementation} needs a GPU ({result.message}); expected"
            " cuda, on a machine with a GPU"
        )
