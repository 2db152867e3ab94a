"""SymmetricRanks: a group whose collectives are one kernel each, for GPUs that address each other.

The collectives of a decode step move a few KiB, so their latency counts and not their bandwidth.
NCCL starts a kernel with a protocol for any size and topology. On one host a kernel can store into
the memory of the other GPUs (`parallel/kernels/exchange.py`). The combination of partial results
exchanges them itself. The memory is torch's symmetric memory; NVLink multicast is not used.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ...engine.rank_group import RankGroup
from ..runtime.launcher import bound_kernel_loads
from .kernels.combine_ranks import Partners
from .kernels.exchange import exchange_kernel

PROGRAMS = 32
"""Programs of each exchange. Always as many, so that their counters agree."""
BLOCK_WORDS = 2048
TRIES_PER_SECOND = 1_000_000
"""Reads of missing words per second of the time limit; one takes about a microsecond or less."""


class SymmetricRanks(RankGroup):
    """A RankGroup over the symmetric memory of one host.

    The results are those of RankGroup. A reduce-scatter adds in the order of the ranks. Tensors
    that do not fit the buffer go through the process group.

    Args:
        group: Process group of NCCL, or None for a single rank.
        capacity: Bytes that a rank receives from each rank in one collective.
        timeout, store, device: As in RankGroup.

    Raises:
        ValueError: The capacity is not a positive multiple of 16.
        RankError: The capacity is not the same on all ranks, or a rank does not answer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        capacity: int = 1 << 20,
        timeout: float = 60.0,
        store: Any = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__(group, timeout, store, device)
        if capacity < 16 or capacity % 16:
            raise ValueError(
                f"capacity = {capacity}: expected a positive multiple of 16 bytes"
            )
        self._capacity = capacity // 4
        self._is_ready = False
        if self.group is None or self.world_size == 1:
            return
        bound_kernel_loads()
        self._memory: list[Any] = []
        self._addresses = self._allocate(self._capacity, capacity=capacity)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=self.device)
        self._late = torch.zeros(self.world_size, dtype=torch.int32, device=self.device)
        self._is_ready = True

    def _allocate(self, words: int, **compared: int) -> Tensor:
        """Return the addresses of memory that all ranks can address: two halves of zeros.

        Args:
            words: Words of an entry; a half has one entry per rank.
            compared: What must be the same on all ranks.
        """
        from torch.distributed import _symmetric_memory as symmetric

        assert self.group is not None
        # torch has no limit for the rendezvous
        self.agree(**compared)
        size = 2 * self.world_size * words
        buffer = symmetric.empty(size, dtype=torch.int64, device=self.device)
        buffer.zero_()
        handle = symmetric.rendezvous(buffer, self.group)
        self._memory.append((buffer, handle))
        # no rank stores into memory that is not yet zero
        self.agree(is_zero=True)
        return torch.tensor(handle.buffer_ptrs, device=self.device)

    @property
    def _tries(self) -> int:
        """How often missing words are read. A multiple of 16: kernels are compiled for that."""
        return min(int(self.timeout * TRIES_PER_SECOND), 2**31 - 16) // 16 * 16

    def find_partners(self, elements: int) -> Partners | None:
        """Return what a combination needs to exchange partial results, or None of a single rank.

        All ranks call this together.

        Args:
            elements: Of a rank's partial results for all ranks, at most.

        Raises:
            RankError: The elements are not the same on all ranks, or a rank does not answer.
        """
        if not self._is_ready:
            return None
        words = -(-elements // self.world_size)
        addresses = self._allocate(words, partial_results=elements)

        calls, arrived = torch.zeros(2, 4, dtype=torch.int32, device=self.device)
        half = self.world_size * words
        return Partners(
            addresses, calls, arrived, self._late, self.rank, self._tries, half
        )

    def run_combination(
        self, combine: Callable[[], Tensor], tensor: Tensor, waits: bool
    ) -> Tensor:
        """Launch a combination that exchanges partial results, and return its result.

        Args:
            combine: Launches it.
            tensor: What this rank has for each rank.
            waits: As in `all_gather`.
        """
        self._expect_usable()
        self._note("combination")
        found = combine()
        self._end("combination", tensor, waits)
        return found

    def _wait(self, before: str) -> None:
        """Raise an error if the device does not finish in time, or a rank was late."""
        super()._wait(before)
        if self._is_ready and self._late.any():
            late = ", ".join(map(str, self._late.nonzero().flatten().tolist()))
            raise self._fail(f"nothing from rank {late} in {self.timeout:g} s", True)

    def _run(
        self, name: str, collective: Callable[..., Any], out: Tensor, tensor: Tensor
    ) -> Tensor:
        """Run a collective, and return `out`."""
        adds, to_all = name == "reduce-scatter", name == "all-gather"
        size = tensor.numel() * tensor.element_size()
        entry = size if to_all else size // self.world_size
        fits = not entry % 4 and entry // 4 <= self._capacity
        is_usable = self._is_ready and self._error is None and tensor.numel() > 0
        if not (fits and is_usable) or (adds and tensor.dtype != torch.float32):
            return super()._run(name, collective, out, tensor)
        self._note(name)
        received = out.view(-1)
        exchange_kernel[(PROGRAMS,)](
            tensor.view(-1).view(torch.int32),
            received if adds else received.view(torch.int32),
            self._addresses,
            self._calls,
            self._late,
            self.rank,
            entry // 4,
            self._capacity,
            self._tries,
            RANKS=self.world_size,
            TO_ALL=to_all,
            ADDS=adds,
            BLOCK=BLOCK_WORDS,
            num_warps=8,
        )
        return out
