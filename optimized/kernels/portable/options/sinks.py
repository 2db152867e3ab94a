"""Attention sinks: a score per head that takes weight in the softmax and has no value."""

import triton
import triton.language as tl

from ...softmax import LOG2_E


@triton.jit
def start_with_sinks(l_i, m_i, sinks, head, is_row, is_counted):
    """Return the running sum and maximum of rows whose first score is their sink.

    The sink has weight 1 at its own maximum.

    Args:
        l_i, m_i: [BLOCK_M] of rows without a score.
        sinks: Optional. [query_heads]. If None, nothing changes.
        head, is_row: [BLOCK_M].
        is_counted: whether these are final rows. Of partial results none counts the sink; it is
            counted once, where they are combined.
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0)
        l_i = tl.where(is_counted, l_i + 1.0, l_i)
        m_i = tl.where(is_counted, sink * LOG2_E, m_i)
    return l_i, m_i
