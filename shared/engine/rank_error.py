"""RankError: a collective did not end on all ranks, or they differ. And who did not report."""

import time
from typing import Any


class RankError(RuntimeError):
    """A collective did not end on all ranks, or the ranks do not agree on the step.

    Args:
        message: Names this rank and the step.
        rank: This rank.
        step: The step in which the error occurred, counted from 1. 0 before the first.
        missing: Ranks that did not report. Empty if they are not known.
    """

    def __init__(
        self, message: str, rank: int, step: int, missing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.missing = missing

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Let another process receive the error."""
        return type(self), (str(self), self.rank, self.step, self.missing)


def find_missing(
    store: Any, rank: int, world_size: int, seconds: float
) -> tuple[int, ...]:
    """Report an error to the store, and return the ranks that have not reported in time."""
    waiting = [other for other in range(world_size) if other != rank]
    try:
        store.set(f"failed/{rank}", "1")
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            waiting = [
                other for other in waiting if not store.check([f"failed/{other}"])
            ]
            time.sleep(0.02)
    except RuntimeError:  # the store has ended too
        return ()
    return tuple(waiting)
