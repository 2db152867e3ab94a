"""ALiBi: slope * (key position - query position) is added to the score."""

import triton
import triton.language as tl


@triton.jit
def load_slopes(alibi_slopes, rows):
    """Return the slope of each row's head: [BLOCK_M]."""
    return tl.load(alibi_slopes + rows.head, mask=rows.is_row, other=0.0)


@triton.jit
def add_alibi(qk, slope, distance):
    """Return the scores with ALiBi: [BLOCK_M, BLOCK_N]."""
    return qk + slope[:, None] * distance
