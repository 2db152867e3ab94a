"""Signatures that drawn cases share, so that few kernels are compiled for them.

Each law draws sizes, dtypes, layouts and options anew, and a GPU kernel is compiled for most of
them. In a run with few signatures, a strategy draws what kernels are compiled for from a few
sources of random numbers, which the seed of the run selects. Lengths, block tables, needles,
poison and numbers are drawn as always. Without a number of signatures nothing is shared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Reuse:
    """The signatures that the drawn cases of a run share.

    Args:
        count: Their number.
        seed: Selects them.
    """

    count: int
    seed: int

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Let strategies draw from these signatures until the end of the context."""
        token = _REUSE.set(self)
        try:
            yield
        finally:
            _REUSE.reset(token)


_REUSE: ContextVar[Reuse | None] = ContextVar("reuse", default=None)


def compiled(pick: Random) -> Random:
    """Return the random numbers from which what kernels are compiled for is drawn.

    Args:
        pick: Those of a case. They are returned if the run shares no signatures.
    """
    reuse = _REUSE.get()
    if reuse is None:
        return pick
    return Random(f"signature {reuse.seed} {pick.randrange(reuse.count)}")


def is_shared() -> bool:
    """Return whether the run's cases share signatures."""
    return _REUSE.get() is not None
