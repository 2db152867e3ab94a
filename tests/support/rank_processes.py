"""Processes that are the ranks of a process group, started once and used by many tests.

A forkserver imports torch once, so eight processes start in seconds. They communicate through gloo
and find each other through a file.
"""

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.running.interpreter import speed_up
from pagetwin.conformance.running.trial import make_setting
from pagetwin.engine.rank_group import GRACE_S, RankError, RankGroup
from torch import distributed as dist

SIZES = (1, 2, 3, 4, 8)
"""Ranks of the groups that the processes form, from the first process on."""
LIMIT_S = 2.0
"""Time limit of the groups in which a rank fails."""


def assert_others_name_rank_1(found: Sequence[Any], step: int, *words: str) -> None:
    """Assert that ranks 0 and 2 of 3 raised in time, because rank 1 did not answer.

    Args:
        found: For each rank its error, and the seconds after which it was raised.
        words: Other words of the errors.
    """
    for rank in (0, 2):
        error, seconds = found[rank]
        assert isinstance(error, RankError)
        assert (error.rank, error.step, error.missing) == (rank, step, (1,)), error
        for word in (f"rank {rank} of 3, step {step}", *words):
            assert word in str(error)
        assert seconds < LIMIT_S + GRACE_S + 1


class RankProcesses:
    """Processes that run a function together, each with its RankGroup.

    Args:
        folder: Where the store of the group is.
        size: Number of processes.
        timeout: Seconds of the time limit of each group.
    """

    def __init__(self, folder: Path, size: int, timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preloaded())
        self.sizes = sorted({smaller for smaller in SIZES if smaller < size} | {size})
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, str(folder / "store"), rank, size, self.sizes, timeout),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, ranks: int, work: Callable[..., Any], *given: Any) -> list[Any]:
        """Return the result of `work(group, *given)` of each rank; an error is a result too."""
        for pipe in self.pipes[:ranks]:
            pipe.send_bytes(pickle.dumps((ranks, work, given)))
        return [self.receive(rank) for rank in range(ranks)]

    def receive(self, rank: int, seconds: float = 120.0) -> Any:
        """Return the result of a rank; None if its process has ended."""
        try:
            if not self.pipes[rank].poll(seconds):
                raise AssertionError(f"rank {rank} has not answered within {seconds} s")
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def preloaded() -> list[str]:
    """Return the modules that the forkserver imports: without a GPU, those of the twins too."""
    if torch.cuda.is_available():
        return ["torch"]
    return ["torch", "pagetwin.reference", "pagetwin.optimized", "pagetwin.conformance"]


def serve(
    pipe: Any, store: str, rank: int, size: int, sizes: list[int], timeout: float
) -> None:
    """Run functions from a pipe until it is closed."""
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        speed_up()
    stores: Any = dist
    every = stores.FileStore(store, size)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=every, rank=rank, world_size=size, timeout=limit
    )
    groups = {}
    for count in sizes:
        group = dist.new_group(list(range(count)), timeout=limit)
        if rank < count:
            reports = stores.PrefixStore(f"reports of {count}", every)
            groups[count] = RankGroup(group, timeout=timeout, store=reports)
    while True:
        try:
            ranks, work, given = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            found = work(groups[ranks], *given)
        except Exception as error:
            found = error
        pipe.send_bytes(pickle.dumps(found))


def end_this_process() -> None:
    """End the process as the kernel ends one that is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def setting_of(twin: str) -> Setting:
    """Return what a rank checks a twin with."""
    return make_setting(
        load_candidate(twin), "cuda" if torch.cuda.is_available() else "cpu"
    )
