"""Which accesses to shared memory are ordered by barriers, whatever order the roles ran in.

Each role counts its releases: it has a clock with one number per role, the last of that role's
releases that it knows of. A role that arrives at a barrier leaves its clock there, and one that has
waited takes it over (vector clocks; Lamport 1978, Mattern 1989). Two accesses of different roles to
one byte, one of them a store, are a race if the later role did not know of the earlier access.
"""

from __future__ import annotations

import threading

import torch

from .places import PLACES
from .values import InterpreterError

LOCAL = threading.local()
"""Its attribute `role` is the role that this thread runs."""


class Clock:
    """The releases of each role that a role knows of.

    Args:
        num_roles: roles of the program.
        number: of the role. If None, it is the clock of a barrier.
    """

    def __init__(self, num_roles: int, number: int | None = None) -> None:
        self.times = torch.zeros(num_roles, dtype=torch.int32)
        self.number = number
        if number is not None:
            self.times[number] = 1

    def join(self, other: Clock) -> None:
        """Learn what another clock knows."""
        torch.maximum(self.times, other.times, out=self.times)

    def release(self, pending: Clock) -> None:
        """Leave what this role knows at a barrier; later accesses are not part of it."""
        pending.join(self)
        self.times[self.number] += 1


class Accesses:
    """The last store to each byte of a buffer, and the last loads of each role.

    Args:
        num_bytes: of the buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self._writer = torch.full((num_bytes,), -1, dtype=torch.int32)
        self._written = torch.zeros(num_bytes, dtype=torch.int32)
        self._read: dict[int, torch.Tensor] = {}
        # lines of the kernel, as indices into PLACES
        self._written_at = torch.zeros(num_bytes, dtype=torch.int32)
        self._read_at: dict[int, torch.Tensor] = {}

    def note(
        self,
        places: torch.Tensor,
        item_bytes: int,
        clock: Clock,
        is_store: bool,
        is_async: bool = False,
        line: int = 0,
    ) -> None:
        """Note an access of a role.

        Args:
            places: of the elements.
            item_bytes: bytes per element.
            clock: that of the role.
            is_store: whether the elements are stored to.
            is_async: whether a copy stores them at some time from now on. Until then they are
                NaN, and a barrier of its own says when they are not.
            line: of the kernel, as an index into PLACES.

        Raises:
            InterpreterError: a race.
        """
        assert clock.number is not None
        places = places.flatten()
        writer = self._writer.view(-1, item_bytes)[places]
        written = self._written.view(-1, item_bytes)[places]
        known = clock.times[writer.clamp(min=0)]
        is_race = (writer >= 0) & (writer != clock.number) & (written > known)
        if bool(is_race.any()):
            other = int(writer[is_race][0])
            at = self._written_at.view(-1, item_bytes)[places][is_race]
            raise InterpreterError(
                f"role {clock.number} {'stores to' if is_store else 'loads'} shared memory that"
                f" role {other} has stored to: expected a barrier between",
                "race",
                others=[(f"role {other} stores", PLACES[int(at[0])])],
            )
        now = int(clock.times[clock.number])
        if not is_store:
            own = self._read.get(clock.number)
            if own is None:
                own = self._read[clock.number] = torch.zeros_like(self._written)
                self._read_at[clock.number] = torch.zeros_like(own)
            own.view(-1, item_bytes)[places] = now
            self._read_at[clock.number].view(-1, item_bytes)[places] = line
            return
        for role, read in self._read.items():
            last = read.view(-1, item_bytes)[places]
            if role == clock.number:
                continue
            is_race = last > clock.times[role]
            if bool(is_race.any()):
                at = self._read_at[role].view(-1, item_bytes)[places][is_race]
                raise InterpreterError(
                    f"role {clock.number} stores to shared memory that role {role} loads:"
                    " expected a barrier between",
                    "race",
                    others=[(f"role {role} loads", PLACES[int(at[0])])],
                )
        self._writer.view(-1, item_bytes)[places] = -1 if is_async else clock.number
        self._written.view(-1, item_bytes)[places] = now
        self._written_at.view(-1, item_bytes)[places] = line

    def find_known_stores(self, clock: Clock) -> torch.Tensor:
        """Return for each byte whether a role knows of the last store to it.  # [num_bytes]

        Args:
            clock: that of the role.
        """
        known = self._written <= clock.times[self._writer.clamp(min=0)]
        return known & (self._writer >= 0)
