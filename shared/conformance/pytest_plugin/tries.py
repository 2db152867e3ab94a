"""Adapters under test: each law is tried in a worker process, as `pagetwin check` does."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..base.results import Result, Status, severity_of, with_known
from ..reports.report import Report
from ..running.again import MOST, try_symptoms_again
from ..running.limits import SECONDS_AFTER, Endings
from ..running.worker import Job, Worker, signatures_on
from .xfails import XfailEntry


class NamedLaw(NamedTuple):
    """A law by name.

    Args:
        name: Its sentence.
        area: Its subject.
        needs: Operations that it needs.
    """

    name: str
    area: str
    needs: tuple[str, ...]


@dataclass
class Adapter:
    """One adapter, with the process in which its laws run.

    Args:
        name: As `check_implementation` takes it: a .py file or the dotted name of a module.
        path: The file. None for a module.
        xfails, quarantined: The entries about it, by law.
        device: The device of its tensors.
        worker: Optional. The process. If None, it cannot be tried here.
    """

    name: str
    path: Path | None
    xfails: Mapping[str, XfailEntry]
    quarantined: Mapping[str, XfailEntry]
    device: str = ""
    worker: Worker | None = None
    _endings: Endings = field(default_factory=Endings)
    _symptoms: set[tuple[object, ...]] = field(default_factory=set)

    def try_law(self, area: str, law: str, is_expected: bool = True) -> Result:
        """Return the result of one law.

        Args:
            area: Its subject.
            law: Its sentence.
            is_expected: Whether an entry makes its failure an expected one.
        """
        worker = self.worker
        assert worker is not None, "the session has begun"
        if time.monotonic() < worker.deadline:
            worker.start()
        named = NamedLaw(law, area, tuple(worker.needs.get(law, ())))
        result = self._endings.untried(named)
        if result is None:
            job = Job(law, signatures=signatures_on(self.device))
            result = worker.try_law(job, area)
            self._endings.note(named, result, worker.failed_at_once)
        if is_expected and (entry := self.xfails.get(law)):
            result = with_known(result, entry.reason)
            if result.status == Status.UNEXPECTED:
                stale = f"remove its entry from {entry.file} ({entry.reason})"
                result = replace(result, reason=stale)
        return result if result.ok else self._explained(result)

    def report(self, *results: Result) -> Report:
        """Return the report of some laws."""
        return Report(self.name, self.device, results)

    def stop(self) -> None:
        """End the process, which the next law starts again."""
        if self.worker is not None:
            self.worker.stop()

    def _explained(self, failure: Result) -> Result:
        """Return a failure with what its input does alone, and where NaN comes from."""
        assert self.worker is not None
        left = max(SECONDS_AFTER, self.worker.deadline - time.monotonic())
        symptom = (severity_of(failure), *failure.symptom)
        if symptom not in self._symptoms and len(self._symptoms) < MOST:
            self._symptoms.add(symptom)
            fresh = Worker(self.name, self.device, gpu=self.worker.gpu)
            (failure,) = try_symptoms_again(fresh, [failure], left)
        if failure.found == "nan":
            # this imports torch
            from ..running.poison import explain_nans

            (failure,) = explain_nans(self.name, self.device, [failure], left)
        return failure
