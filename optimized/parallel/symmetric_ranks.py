"""SymmetricRanks: a group whose collectives are one kernel each, for GPUs that address each other.

The collectives of a decode step move a few KiB, so their latency counts and not their bandwidth.
NCCL starts a kernel with a protocol for any size and topology. On one host a kernel can store into
the memory of the other GPUs (`parallel/kernels/exchange.py`). The memory is torch's symmetric
memory; NVLink multicast is not used.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ...engine.rank_group import RankGroup
from ..runtime.launcher import bound_kernel_loads
from .kernels.exchange import exchange_kernel

PROGRAMS = 32
"""Programs of each exchange. Always as many, so that their counters agree."""
BLOCK_WORDS = 2048
TRIES_PER_SECOND = 1_000_000
"""Reads of a signal per second of the time limit; one takes about a microsecond or less."""


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
        from torch.distributed import _symmetric_memory as symmetric

        # torch has no limit for the rendezvous
        self.agree(capacity=capacity)
        words = self.world_size * (PROGRAMS + 2 * self._capacity)
        self._buffer = symmetric.empty(words, dtype=torch.int32, device=self.device)
        self._buffer.zero_()
        self._handle = symmetric.rendezvous(self._buffer, self.group)
        self._addresses = torch.tensor(self._handle.buffer_ptrs, device=self.device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=self.device)
        self._late = torch.zeros(self.world_size, dtype=torch.int32, device=self.device)
        # through the process group: no rank stores into a buffer that is not yet zero
        self.agree(is_zero=True)
        self._is_ready = True

    def _wait(self, before: str) -> None:
        """Raise an error if the device does not finish in time, or a rank was late."""
        super()._wait(before)
        if self._is_ready and self._late.any():
            late = ", ".join(map(str, self._late.nonzero().flatten().tolist()))
            raise self._fail(f"no signal from rank {late} in {self.timeout:g} s", True)

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
            min(int(self.timeout * TRIES_PER_SECOND), 2**31 - 1),
            RANKS=self.world_size,
            TO_ALL=to_all,
            ADDS=adds,
            BLOCK=BLOCK_WORDS,
            num_warps=8,
        )
        return out
