"""Search: from the default in steps that save time, or all values; then a race with the default."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..kernels.portable.tables.kernel_tables import KernelTables
from .candidates import Space
from .trial import Trial, compare

QUICK_REPEATS, REPEATS = 7, 9
"""Runs of a candidate in the search, and in a round of the last race."""
LEAST_ROUNDS, ROUNDS = 3, 5
"""Rounds of the last race, if the time is over, and if it is not."""
STEP_SHARE = 0.99
"""The search goes on from a candidate whose time is at most this share."""
LARGEST_SHARE = 0.98
"""A choice replaces the default if its time is at most this share. Medians of one captured graph
that is timed twice in alternation may differ by 1 %."""
WORST_SHARE = 1.01
"""The share in any one case, at most."""
AT_ONCE = 8
"""Candidates that are compiled and timed together."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Args:
        choice: the value that was chosen.
        default_us, choice_us: median microseconds by case.
    """

    choice: Any
    default_us: dict[str, float]
    choice_us: dict[str, float]


@dataclass
class Search:
    """The search for one choice.

    Args:
        trial: its cases.
        space: its values.
        default: the value that is used without tables.
        apply: returns the tables with a value.
        is_over: returns whether the time of the search is over.
        is_exhaustive: whether all values are tried.
        on_candidate: called with the number of candidates that were timed.
    """

    trial: Trial
    space: Space
    default: Any
    apply: Callable[[Any], KernelTables]
    is_over: Callable[[], bool]
    is_exhaustive: bool
    on_candidate: Callable[[int], None]

    def run(self) -> Any:
        """Return the value that took least time. The default must be prepared."""
        if self.is_exhaustive:
            best = self.default
            values = [value for value in self.space.grid() if value != best]
            for begin in range(0, len(values), AT_ONCE):
                if self.is_over():
                    break
                best = self._improve(best, values[begin : begin + AT_ONCE])
            return best
        best, tried = self.default, {self.default}
        while not self.is_over():
            near = [
                value for value in self.space.neighbours(best) if value not in tried
            ]
            tried.update(near)
            better = self._improve(best, near) if near else best
            if better == best:
                break
            best = better
        return best

    def _improve(self, best: Any, values: Sequence[Any]) -> Any:
        """Return the best of some values if it saves time, or the best one so far."""
        able = self.trial.prepare({value: self.apply(value) for value in values})
        if not able:
            return best
        times = self.trial.race([best, *able], QUICK_REPEATS)
        self.on_candidate(len(able))
        means = {value: compare(times, value, best)[0] for value in able}
        fastest = min(able, key=means.__getitem__)
        better = fastest if means[fastest] <= STEP_SHARE else best
        # graphs take memory
        self.trial.forget(list({self.default, better}))
        return better


def confirm(
    trial: Trial, default: Any, choice: Any, is_over: Callable[[], bool]
) -> SearchResult:
    """Return a choice if it is faster than the default by more than noise, and the default if not.

    The choice has to take at most LARGEST_SHARE of the time, to be faster in every round, and to be
    slower in no case by more than WORST_SHARE allows.

    Args:
        is_over: returns whether the time of the job is over.
    """
    values = [default] if choice == default else [default, choice]
    rounds = [trial.race(values, REPEATS)]
    while len(values) > 1 and len(rounds) < (LEAST_ROUNDS if is_over() else ROUNDS):
        rounds.append(trial.race(values, REPEATS))
    medians = {
        value: {
            case.name: statistics.median(times[index][value] for times in rounds)
            for index, case in enumerate(trial.cases)
        }
        for value in values
    }
    means = [compare(times, values[-1], default)[0] for times in rounds]
    ratios = [
        medians[values[-1]][name] / medians[default][name] for name in medians[default]
    ]
    is_faster = (
        statistics.median(means) <= LARGEST_SHARE
        and max(means) < 1
        and max(ratios) <= WORST_SHARE
    )
    best = choice if is_faster else default
    return SearchResult(best, medians[default], medians[best])
