"""States of the barriers of a program: mbarriers and named barriers."""

from __future__ import annotations

from dataclasses import dataclass

from .accesses import Clock
from .values import InterpreterError


@dataclass
class Barrier:
    """The state of an mbarrier.

    Attributes:
        count: arrivals of a phase.
        pending: arrivals that are missing in this phase.
        expected: bytes that are missing in this phase; negative if they arrived before they were
            expected.
        completed: phases that have completed.
        arriving, released: what the arrivals of this phase knew, and those of completed ones.
    """

    count: int
    pending: int
    arriving: Clock
    released: Clock
    expected: int = 0
    completed: int = 0

    def advance(self) -> None:
        """Complete the phase if nothing is missing."""
        if self.pending < 0:
            raise InterpreterError("more arrivals at an mbarrier than it counts")
        if self.pending == 0 and self.expected == 0:
            self.pending = self.count
            self.completed += 1
            self.released.join(self.arriving)


@dataclass
class NamedBarrier:
    """The state of a named barrier: threads that have arrived, and how often it was complete.

    Attributes:
        arriving, released: as in `Barrier`.
    """

    arriving: Clock
    released: Clock
    arrived: int = 0
    completed: int = 0
