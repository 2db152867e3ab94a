"""Buffers of a parallel step by name, which keep their addresses when larger ones are needed."""

import math

import torch
from torch import Tensor

from ...engine.kept_memory import make_kept
from ...engine.rank_waits import wait_for_ranks
from ..runtime.launcher import bound_kernel_loads


class RankBuffers:
    """Tensors that are kept from call to call, so that a CUDA graph may capture a call.

    A larger step allocates further buffers, and those of smaller steps are kept. So a step of a
    size that fitted before gets the same addresses again, and a graph that was captured at any time
    reads and writes memory that nothing else uses. A new buffer has at least twice the size of the
    largest one. So the buffers of a name have together less than four times the largest step.
    """

    def __init__(self) -> None:
        bound_kernel_loads()
        self._buffers: dict[tuple[str, torch.dtype, torch.device], list[Tensor]] = {}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the smallest buffer of that name that fits, on the device of `like`.

        Args:
            shape: Of the result, which is a view of the buffer.
            dtype: Optional. If None, that of `like`.
        """
        elements, dtype = math.prod(shape), dtype or like.dtype
        # in the order of their sizes
        kept = self._buffers.setdefault((name, dtype, like.device), [])
        for buffer in kept:
            if len(buffer) >= elements:
                return buffer[:elements].view(shape)
        wait_for_ranks("a buffer is allocated")
        size = max(elements, 2 * len(kept[-1])) if kept else elements
        kept += make_kept(lambda: (like.new_zeros(size, dtype=dtype),), like.device)
        return kept[-1][:elements].view(shape)
