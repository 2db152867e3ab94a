"""Classes of a tuning run: what is measured, with which clock, and what comes out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

TIMED = (
    "decode", "small batch", "append", "prefill", "min_segment", "short_tiles",
    "short_rest_keys", "short_rest_programs",
)  # fmt: skip
"""What a job times with several values: tiles of a kernel, or a threshold between kernels."""


class TuningInUse(NamedTuple):
    """The tables that plans on a device are made from.

    Args:
        fingerprint: twelve hexadecimal digits of their contents, or "default".
        path: Optional. The tuning file that they were read from.
    """

    fingerprint: str
    path: Path | None

    def __str__(self) -> str:
        """Return the fingerprint, and the name of the file."""
        return self.fingerprint + (f" ({self.path.name})" if self.path else "")


class TuningInputs(NamedTuple):
    """The tensors of a batch.

    Args:
        arguments: arguments of `paged_attention` by name, with `out`; of `cascade_attention` with
            `common_prefix_len`.
        check: returns what is wrong in `out`; an empty string if nothing is.
    """

    arguments: Mapping[str, Any]
    check: Callable[[Tensor], str]


class TuningCase(NamedTuple):
    """A batch that is timed.

    Args:
        name: its name in the file.
        make: returns its tensors, which are released after the job.
    """

    name: str
    make: Callable[[], TuningInputs]


@dataclass(frozen=True)
class TuningJob:
    """One choice that is measured.

    Args:
        what: one of TIMED, or "rates" for the rates of the cost model.
        cases: batches of one kind of layer, on which the choice is timed.
        proofs: batches on which the result of what was chosen is checked, and which are not timed.
        rows: rows of the tile, of "append".
    """

    what: str
    cases: tuple[TuningCase, ...]
    proofs: tuple[TuningCase, ...] = ()
    rows: int = 0


class TuningClock(Protocol):
    """What measures time, so that a test can replace it."""

    def now(self) -> float:
        """Return the seconds since any moment."""

    def prepare(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return what is timed instead of a call that has run once, such as a captured graph."""

    def race(
        self, calls: Mapping[Any, Callable[[], None]], repeats: int
    ) -> dict[Any, list[float]]:
        """Return the microseconds of each prepared call's runs, which alternate."""

    def wait(self) -> None:
        """Wait until the device is done.

        Raises:
            RuntimeError: a kernel has accessed invalid memory, and the device is lost.
        """


@dataclass(frozen=True)
class TuningReport:
    """What a tuning run found.

    Args:
        record: the JSON of a tuning file.
        path: where a file of this chip is found without being named.
        ended: "complete", or what ended the run.
        wrong: candidates whose results were wrong, in words. None of them was chosen.
        skipped: number of candidates that could not be compiled or launched.
        tried: number of candidates that were timed.
    """

    record: dict[str, Any]
    path: Path
    ended: str
    wrong: tuple[str, ...]
    skipped: int
    tried: int
