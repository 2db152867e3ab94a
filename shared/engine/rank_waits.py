"""Waits of the host in a parallel step: each ends within the time limit of the step's group.

A collective on a GPU ends when all ranks take part in it. Until then the stream is blocked, and so
is all that waits for the device: a copy to the host, a pageable copy to the device, the zeroing of
a new workspace, the loading of a kernel. CUDA bounds none of these waits. So `wait_for_ranks` comes
before each of them: it polls the device, and raises a RankError when the time is over.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

POLL_S = 0.0005
"""Seconds between two queries of the device, at most."""


class Waiting(Protocol):
    """A group of ranks whose collectives the device may still run."""

    def wait(self, before: str = "") -> None:
        """Wait until the device has finished, at most for the time limit."""


class _Latest(threading.local):
    """The group of this thread's latest step or collective on a GPU."""

    group: "weakref.ref[Waiting] | None" = None


_LATEST = _Latest()


def note_group(group: Waiting) -> None:
    """Let `wait_for_ranks` of this thread wait for the collectives of a group."""
    _LATEST.group = weakref.ref(group)


def wait_for_ranks(before: str) -> None:
    """Wait for the collectives of this thread's latest group, at most for its time limit.

    Without such a group, and during the capture of a CUDA graph, nothing is waited for.

    Args:
        before: what the caller does next, for the error.

    Raises:
        RankError: another rank did not take part in a collective.
    """
    group = None if _LATEST.group is None else _LATEST.group()
    if group is not None:
        group.wait(before)


def come_true(queries: Sequence[Callable[[], bool]], limit_s: float) -> bool:
    """Return whether all queries are true within a limit of seconds."""
    begin = time.monotonic()
    while not all(query() for query in queries):
        waited = time.monotonic() - begin
        if waited > limit_s:
            return False
        # most collectives end within microseconds
        time.sleep(min(POLL_S, waited / 8))
    return True
