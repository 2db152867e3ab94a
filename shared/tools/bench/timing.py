"""Timing: CUDA graph replays with a cold L2 cache, interleaved calls, host time.

On a GPU the replay of the captured graph is timed, between two events, after the L2 cache has been
flushed. So host time is not included; it is measured separately. The calls of one workload
alternate in an order that is drawn again for each turn, because a hot card is slower.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""Four times the largest L2 cache of a Hopper chip."""
SECONDS_AT_MOST = 2.0
"""Time limit per call in a round."""
LEAST_REPEATS = 3
SHORT_CALL = 1e-3
"""Seconds of host time below which calls are timed ten at a time."""


@dataclass(frozen=True)
class Captured:
    """The CUDA graph of a call.

    Args:
        replay: Runs the graph again, on the same memory.
        result: The result of the captured call. Each replay overwrites it.
    """

    replay: Callable[[], Any]
    result: Any


def captured(call: Callable[[], Any]) -> Captured | None:
    """Return the graph of a call that has run before, or None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None

    def replay(_needed: object = call) -> None:
        # a graph holds addresses only, so the tensors must stay allocated
        graph.replay()

    return Captured(replay, result)


def time_host(call: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median microseconds until a call returns, as `time_hosts` measures it."""
    return time_hosts({"": call}, repeats, random.Random(0))[""]


def time_hosts(
    calls: Mapping[str, Callable[[], Any]], repeats: int, order: random.Random
) -> dict[str, float]:
    """Return the median microseconds until each call returns, without waiting for the device.

    Short calls are timed ten at a time, consecutively, as the layers of a model make them. The
    calls alternate, because other processes slow the host down for a part of the time.

    Args:
        calls: Calls by name.
        repeats: Number of turns. A slow call gets fewer.
        order: Random generator of the order within a turn.
    """
    together = {}
    for name, call in calls.items():
        call()  # compiles the kernels
        begin = time.perf_counter()
        call()
        together[name] = 10 if time.perf_counter() - begin < SHORT_CALL else 1
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        limit = 1e6 * SECONDS_AT_MOST
        names = [name for name in calls if sum(times[name]) * together[name] <= limit]
        order.shuffle(names)
        for name in names:
            call = calls[name]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(together[name]):
                call()
            passed = time.perf_counter() - begin
            times[name].append(1e6 * passed / together[name])
    return {name: statistics.median(runs) for name, runs in times.items()}


class Stopwatch:
    """Times calls on one device, each with a cold L2 cache.

    Args:
        device: The device of the calls.
        flush_bytes: Bytes that are written before each call on a GPU.
    """

    def __init__(self, device: str, flush_bytes: int = FLUSH_BYTES) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        size = flush_bytes if self.on_gpu else 1
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def start(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Run a call and return a function that gives its microseconds after the device is done."""
        if not self.on_gpu:
            begin = time.perf_counter()
            call()
            passed = 1e6 * (time.perf_counter() - begin)
            return lambda: passed
        # the flush keeps the device busy while the host launches the timed call
        self._flush.zero_()
        event: Any = torch.cuda.Event
        begins, ends = event(enable_timing=True), event(enable_timing=True)
        begins.record()
        call()
        ends.record()
        return lambda: 1e3 * float(begins.elapsed_time(ends))

    def time(self, call: Callable[[], Any]) -> float:
        """Return the microseconds of one run."""
        took = self.start(call)
        self.wait()
        return took()

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize()


def time_interleaved(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    order: random.Random,
    stopwatch: Stopwatch,
) -> dict[str, list[float]]:
    """Return the microseconds of each call's runs, one of each in every turn.

    Args:
        calls: Calls by name.
        repeats: Number of turns. A slow call gets fewer, but at least LEAST_REPEATS.
        order: Random generator of the order within a turn.
        stopwatch: Stopwatch of their device.
    """
    budgets = {}
    for name, call in calls.items():
        if not stopwatch.on_gpu:
            budgets[name] = repeats
            continue
        once = max(stopwatch.time(call), 1.0)
        budgets[name] = max(LEAST_REPEATS, int(1e6 * SECONDS_AT_MOST / once))
    started: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for turn in range(repeats):
        names = [name for name in calls if turn < budgets[name]]
        order.shuffle(names)
        for name in names:
            started[name].append(stopwatch.start(calls[name]))
    stopwatch.wait()
    return {name: [took() for took in runs] for name, runs in started.items()}


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, median, high
