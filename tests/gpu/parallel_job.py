"""One rank of a run on several GPUs: its groups, its results, and timing under CUDA graphs."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from pagetwin.engine.rank_group import RankGroup
from pagetwin.engine.rank_waits import wait_for_ranks
from torch import distributed as dist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 16
"""Calls in one captured graph."""
REPLAYS = 25


class Job:
    """A rank, and what it has found.

    Args:
        groups: Name of each way to exchange tensors, and its group.
    """

    def __init__(self, groups: dict[str, RankGroup]) -> None:
        self.groups = groups
        self.ranks = next(iter(groups.values()))
        self.alone = RankGroup(device=DEVICE)
        self.found: dict[str, Any] = {}
        self._begin = time.monotonic()

    def announce(self, name: str) -> None:
        """Print what begins now on the first rank, and after how many seconds."""
        if self.ranks.rank == 0:
            seconds = time.monotonic() - self._begin
            print(f"{seconds:6.1f} s: {name} ...", flush=True)

    def has_failed(self) -> bool:
        """Return whether anything that was said is a failure."""
        return any("FAILED" in entry["text"] for entry in self.found.values())

    def say(self, name: str, text: str, **figures: Any) -> None:
        """Print a line on the first rank, and keep its figures."""
        rounded = {
            key: round(value, 2) if isinstance(value, float) else value
            for key, value in figures.items()
        }
        self.found[name] = {"text": text, **rounded}
        if self.ranks.rank == 0:
            written = ", ".join(f"{key} {value}" for key, value in rounded.items())
            print(f"{name}: {text} {written}".rstrip(), flush=True)

    def gathered(self, value: Any) -> list[Any]:
        """Return a value of every rank, through the host."""
        found: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(found, value, group=self.ranks.group)
        return found

    def microseconds(
        self, call: Callable[[], Any], together: bool = True, calls: int = LAYERS
    ) -> float:
        """Return the microseconds of one call in a graph, of the slowest rank.

        Args:
            together: Whether the ranks start each replay together.
            calls: Calls in the graph.
        """
        replay = captured(call, calls)
        meeting = torch.zeros(64, device=DEVICE)
        make_event: Any = torch.cuda.Event
        begin, end = (make_event(enable_timing=True) for _ in range(2))
        times: list[float] = []
        for _ in range(REPLAYS):
            if together:
                dist.barrier()
            wait_for_ranks("a replay is timed")
            torch.cuda.synchronize()
            if together:
                # after a collective the devices start within a microsecond of each other
                self.ranks.all_gather(meeting)
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / calls)
        found = statistics.median(times[5:])
        return max(self.gathered(found)) if together else found


def captured(call: Callable[[], Any], calls: int = 1) -> Callable[[], None]:
    """Return the replay of a graph with some calls. They are made before it is captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    wait_for_ranks("a graph is captured")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog calls CUDA in a thread of its own
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()

    def replay(_kept: object = call) -> None:
        graph.replay()

    return replay
