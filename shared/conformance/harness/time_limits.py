"""Time limits of a check, and the report of one that ended before all laws were judged."""

import math
import time
from collections.abc import Mapping, Sequence

from .law import Law
from .report import Report, Result, Status

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


def report_so_far(
    implementation: str,
    device: str,
    laws: Sequence[Law],
    judged: Mapping[str, Result],
    settings: Mapping[str, int],
) -> Report:
    """Return the report of a check that has not judged all laws. The others are not finished.

    Args:
        implementation, device: As in `Report`.
        laws: All laws of the check.
        judged: The results so far, by law.
        settings: Seed and number of examples.
    """
    untried = "the check ended before this law"
    results = [
        judged.get(law.name)
        or Result(law.name, law.area, Status.UNFINISHED, reason=untried)
        for law in laws
    ]
    return Report(implementation, device, tuple(results), settings)
