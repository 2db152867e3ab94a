"""Clock of a tuning run: captured graphs with a cold L2 cache, in alternation, as the benchmark."""

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..bench.timing import LEAST_REPEATS, Stopwatch, captured, time_interleaved

RACE_SECONDS = 2.0
"""What a race takes at most, if its calls are not so slow that the fewest turns take longer."""


class BenchClock:
    """Times calls on one device, see `TuningClock`.

    Args:
        device: The device.
        seed: Seed of the order of calls.
    """

    def __init__(self, device: str, seed: int = 0) -> None:
        self._stopwatch = Stopwatch(device)
        self._order = random.Random(seed)
        if self._stopwatch.on_gpu:
            # each capture of a graph collects garbage, among all objects that are not frozen
            gc.collect()
            gc.freeze()

    def now(self) -> float:
        """Return the seconds since any moment."""
        return time.monotonic()

    def prepare(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of a call's graph; the call itself if it cannot be captured."""
        graph = captured(call) if self._stopwatch.on_gpu else None
        return call if graph is None else graph.replay

    def race(
        self, calls: Mapping[Any, Callable[[], None]], repeats: int
    ) -> dict[Any, list[float]]:
        """Return the microseconds of each call's runs, one of each in every turn.

        Slow calls have fewer turns, so that a race takes about RACE_SECONDS.
        """
        once = sum(map(self._stopwatch.time, calls.values())) / 1e6
        least = LEAST_REPEATS if self._stopwatch.on_gpu else 1
        repeats = max(least, min(repeats, int(RACE_SECONDS / max(once, 1e-9))))
        names = list(calls)
        by_name = {str(index): calls[name] for index, name in enumerate(names)}
        times = time_interleaved(by_name, repeats, self._order, self._stopwatch)
        return {name: times[str(index)] for index, name in enumerate(names)}

    def wait(self) -> None:
        """Wait until the device is done."""
        self._stopwatch.wait()


def free_memory() -> int | None:
    """Return the free bytes of the GPU. None without one."""
    if not torch.cuda.is_available():
        return None
    free: int = torch.cuda.mem_get_info()[0]
    return free
