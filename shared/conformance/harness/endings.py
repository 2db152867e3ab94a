"""Laws that end a process at their first call, and laws that are therefore not tried.

An implementation that ends every process would otherwise start a process per law. That takes
minutes, and shows nothing new. One whose first case takes longer than a law may would take the time
limit per law.
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
        self._unfinished: Counter[frozenset[str]] = Counter()
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
            elif result.status == Status.UNFINISHED and result.case:
                self._unfinished[key] += 1
        elif failed_at_once:
            self._fatal[key] += 1

    def untried(self, law: Law) -> Result | None:
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
