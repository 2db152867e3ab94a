"""int8_per_token_head: codes of eight bits with a scale per token and head (`token_scales.py`).

Codes are exact in float16 and bfloat16.
"""

import triton
import triton.language as tl

from .token_scales import measure


@triton.jit
def encode_int8(numbers):
    """Return the codes of rows, and the scale of each row.

    The code of NaN is -128, as that of infinity.

    Args:
        numbers: [ROWS, ELEMENTS] float32. Elements past the end of a row are 0.

    Returns:
        [ROWS, ELEMENTS] int8, [ROWS] float32.
    """
    quotient, scale = measure(numbers, 127.0)
    # half away from zero, by truncation. A minimum before the sum: a fused multiply-add would
    # round once
    size = tl.minimum(tl.abs(quotient), 127.0) + 0.5
    moved = tl.where(quotient < 0, -size, size)
    return tl.where(quotient == quotient, moved, -128.0).to(tl.int8), scale


@triton.jit
def decode_int8(codes, dtype):
    """Return codes as numbers, each exact: [BLOCK_N, elements]."""
    return codes.to(dtype)
