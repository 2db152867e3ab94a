"""Causal mask: a query attends to the keys up to its own position."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# values of config.masks.CAUSAL; PER_REQUEST reads a flag per request
NOT_CAUSAL, CAUSAL, PER_REQUEST = 0, 1, 2


class CausalFlags(NamedTuple):
    """A flag per request: uint8 pointer and stride."""

    flags: Any
    stride: Any


def lower(causal: bool | Tensor) -> tuple[int, CausalFlags | None]:
    """Return config.masks.CAUSAL and the flags, if there is one per request."""
    if not isinstance(causal, Tensor):
        return int(causal), None
    return PER_REQUEST, CausalFlags(causal.view(torch.uint8), causal.stride(0))


@triton.jit
def load_is_causal(causal, req, is_req, CAUSAL: tl.constexpr):
    """Return whether requests are causal. Only those of `is_req` are read."""
    is_causal = True
    if CAUSAL == 2:
        is_causal = tl.load(causal.flags + req * causal.stride, mask=is_req, other=0)
        is_causal = is_causal != 0
    return is_causal


@triton.jit
def limit_to_past(end, position, seq_len, is_causal, CAUSAL: tl.constexpr):
    """Return the end of the visible range under the causal mask."""
    if CAUSAL == 1:
        # windows and chunks end no earlier than this
        end = tl.minimum(position + 1, seq_len)
    elif CAUSAL == 2:
        end = tl.where(is_causal, tl.minimum(position + 1, end), end)
    return end
