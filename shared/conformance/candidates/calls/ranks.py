"""Ranks in one process: a group whose ranks run in turn, so that laws need no process group.

Each rank is a thread, and exactly one of them runs at a time. A rank runs until its next collective
or its end. When all ranks have arrived, the tensors are exchanged. The order in which the ranks run
is drawn from a seed, so a late rank is a case like any other. Ranks that would wait for each other
forever raise an error.
"""

import threading
from collections.abc import Callable
from copy import copy
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....engine.rank_group import RankError, RankGroup
from ...checks.expect import Disagreement

T = TypeVar("T")


def run_ranks(
    world_size: int,
    work: Callable[[RankGroup], T],
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[T]:
    """Return the result of each rank.

    Args:
        world_size: Number of ranks.
        work: What every rank does with its group.
        seed: Of the order in which the ranks run.
        device: Device of the exchanged tensors.

    Raises:
        Disagreement: The ranks do not make the same collectives.
        Exception: The first error of a rank.
    """
    if world_size == 1:
        return [work(RankGroup(device=device))]
    return _Meeting(world_size, seed, torch.device(device)).run(work)


class _LocalRanks(RankGroup):
    """One rank of a group in this process."""

    def __init__(self, meeting: "_Meeting", rank: int) -> None:
        super().__init__(device=meeting.device)
        self.rank, self.world_size, self.backend = rank, meeting.world_size, "local"
        self._meeting = meeting

    def __deepcopy__(self, memo: object) -> "_LocalRanks":
        """Return a copy whose collectives raise: the ranks wait for the group itself."""
        found = copy(self)
        found._meeting = _Meeting(0, 0, self.device)
        return found

    def _run(
        self, name: str, collective: Callable[..., Any], out: Tensor, tensor: Tensor
    ) -> Tensor:
        self._expect_two_buffers(name, out, tensor)
        self._meeting.arrive(self.rank, (name, out, tensor))
        return out

    def _start_shift(self, tensor: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Exchange the tensors when they are waited for, which is the latest possible moment.

        What is sent then has every change that was made too early, and what is received is NaN
        until then.
        """
        self._expect_two_buffers("shift", out, tensor)
        out.fill_(torch.nan)

        def finish() -> Tensor:
            self._meeting.arrive(self.rank, ("shift", out, tensor))
            return out

        return finish

    def _expect_two_buffers(self, name: str, out: Tensor, tensor: Tensor) -> None:
        if not (out.is_contiguous() and tensor.is_contiguous()):
            raise Disagreement(f"{name} of rank {self.rank}", "its tensors", "strided",
                               "contiguous")  # fmt: skip
        if tensor.numel() and out.data_ptr() == tensor.data_ptr():
            # another rank may still read what this one receives into
            raise Disagreement(
                f"{name} of rank {self.rank}", "its buffers", "one for both", "two"
            )


class _Meeting:
    """The ranks, and the tensors with which they have arrived at a collective."""

    def __init__(self, world_size: int, seed: int, device: torch.device) -> None:
        self.world_size = world_size
        self.device = device
        self._order = Random(seed)
        self._may_run = [threading.Event() for _ in range(world_size)]
        self._has_stopped = threading.Event()
        self._arrived: dict[int, tuple[str, Tensor, Tensor]] = {}
        self._ended: dict[int, BaseException | None] = {}
        self._is_broken = False

    def run(self, work: Callable[[RankGroup], T]) -> list[T]:
        """Run all ranks to their end, and return their results."""
        results: dict[int, T] = {}
        default = torch.get_default_dtype()

        def body(rank: int) -> None:
            self._may_run[rank].wait()
            torch.set_default_dtype(default)
            error: BaseException | None = None
            try:
                results[rank] = work(_LocalRanks(self, rank))
            except BaseException as found:
                error = found
            self._ended[rank] = error
            self._has_stopped.set()

        threads = [
            threading.Thread(target=body, args=(rank,), daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        while len(self._ended) < self.world_size:
            for rank in self._order.sample(range(self.world_size), self.world_size):
                if rank not in self._ended:
                    self._let_run(rank)
            self._exchange()
        for thread in threads:
            thread.join()
        torch.set_default_dtype(default)
        errors = [error for error in self._ended.values() if error is not None]
        # a rank that waited for one with an error has no error of its own
        errors.sort(key=lambda error: isinstance(error, RankError) and self._is_broken)
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.world_size)]

    def arrive(self, rank: int, given: tuple[str, Tensor, Tensor]) -> None:
        """Wait with the tensors of a collective until all ranks have exchanged theirs."""
        if rank >= self.world_size:
            raise RankError(f"rank {rank}: this group is a copy", rank, 0, ())
        self._arrived[rank] = given
        # one for all threads, and another rank may have changed it when this one continues
        default = torch.get_default_dtype()
        self._may_run[rank].clear()
        self._has_stopped.set()
        self._may_run[rank].wait()
        torch.set_default_dtype(default)
        if self._is_broken:
            raise RankError(
                f"rank {rank} of {self.world_size}: {given[0]} has not ended on all ranks",
                rank,
                0,
                tuple(rank_ended for rank_ended in self._ended),
            )

    def _let_run(self, rank: int) -> None:
        self._has_stopped.clear()
        self._may_run[rank].set()
        self._has_stopped.wait()

    def _exchange(self) -> None:
        """Exchange the tensors of a collective, or break the group if ranks are missing."""
        if not self._arrived:
            return
        arrived, self._arrived = self._arrived, {}
        if len(arrived) < self.world_size:
            self._is_broken = True
            return
        names = {name for name, _, _ in arrived.values()}
        shapes = {(tensor.shape, tensor.dtype) for _, _, tensor in arrived.values()}
        if len(names) > 1 or len(shapes) > 1:
            raise Disagreement(
                "collectives", "of the ranks", sorted(map(str, names | shapes)), "one"
            )
        self._wait_for_streams()  # each rank may use a stream of its own
        sent = [arrived[rank][2].clone() for rank in range(self.world_size)]
        for rank, (name, out, _) in arrived.items():
            if name == "all-gather":
                out.copy_(torch.stack(sent))
            elif name == "shift":
                out.copy_(sent[rank - 1])
            else:
                parts = torch.stack([tensor[rank] for tensor in sent])
                out.copy_(parts if name == "all-to-all" else parts.sum(0))
        self._wait_for_streams()

    def _wait_for_streams(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
