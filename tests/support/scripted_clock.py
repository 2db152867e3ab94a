"""A clock for tuning runs: times follow from values, and seconds pass only in races."""

from collections.abc import Callable, Mapping
from typing import Any


class ScriptedClock:
    """Times what it is told; see `TuningClock`.

    Args:
        time: returns the microseconds of a value.
        race_seconds: what a race takes.
        on_race: called before each race.
    """

    def __init__(
        self,
        time: Callable[[Any], float],
        race_seconds: float = 0.0,
        on_race: Callable[[], None] = lambda: None,
    ) -> None:
        self.time, self.race_seconds, self.on_race = time, race_seconds, on_race
        self.seconds = 0.0
        self.raced: list[list[Any]] = []

    def now(self) -> float:
        return self.seconds

    def prepare(self, call: Callable[[], None]) -> Callable[[], None]:
        return call

    def race(
        self, calls: Mapping[Any, Callable[[], None]], repeats: int
    ) -> dict[Any, list[float]]:
        self.on_race()
        self.seconds += self.race_seconds
        self.raced.append(list(calls))
        return {value: [self.time(value)] * repeats for value in calls}

    def wait(self) -> None:
        """Nothing runs on a device."""
