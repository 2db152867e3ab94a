"""Laws that end a process at their first call, and laws that are therefore not tried.

An implementation that ends every process would otherwise start a process per law. That takes
minutes, and shows nothing new.
"""

from collections import Counter

from .law import Law
from .report import Result, Status
from .worker import FATAL

ENDINGS = 3
"""Laws that may end a process at their first call before others of their operations are not
tried."""


class Endings:
    """Laws that ended a process at their first call, by the operations that they need."""

    def __init__(self) -> None:
        self._fatal: Counter[frozenset[str]] = Counter()
        self._judged: set[frozenset[str]] = set()

    def note(self, law: Law, result: Result, failed_at_once: bool) -> None:
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
        elif failed_at_once:
            self._fatal[key] += 1

    def untried(self, law: Law) -> Result | None:
        """Return the result of a law that is not tried, or None if it is to be tried."""
        for key, count in list(self._fatal.items()):
            if count < ENDINGS or key in self._judged:
                continue
            if key <= set(law.needs):
                names = ", ".join(sorted(key))
                reason = (
                    f"{ENDINGS} laws of {names} ended the process at their first call"
                )
                return Result(law.name, law.area, Status.NOT_TRIED, reason=reason)
        return None
