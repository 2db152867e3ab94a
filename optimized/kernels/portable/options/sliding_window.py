"""Sliding window: a query attends to W keys to each side, its own position included."""

import triton
import triton.language as tl


@triton.jit
def limit_to_window(begin, end, position, WINDOW: tl.constexpr):
    """Return the visible range, limited to position - WINDOW + 1 ... position + WINDOW - 1."""
    begin = tl.maximum(position - WINDOW + 1, begin)
    end = tl.minimum(position + WINDOW, end)
    return begin, end
