"""Buffers of a parallel step by name, which grow to the largest step so far."""

import math

import torch
from torch import Tensor


class RankBuffers:
    """Tensors that are kept from call to call, so that a CUDA graph may capture a call.

    A larger step allocates new ones. A graph that was captured before it still uses the old ones,
    which are freed: capture it again, or run the largest step first.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the buffer of that name, with that shape, on the device of `like`.

        Args:
            dtype: Optional. If None, that of `like`.
        """
        elements, dtype = math.prod(shape), dtype or like.dtype
        found = self._buffers.get(name)
        if found is None or found.dtype != dtype or len(found) < elements:
            found = self._buffers[name] = like.new_zeros(elements, dtype=dtype)
        return found[:elements].view(shape)
