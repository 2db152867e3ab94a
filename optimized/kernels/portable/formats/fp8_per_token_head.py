"""fp8_per_token_head: float8_e4m3fn codes with a scale per token and head (`token_scales.py`).

Codes are decoded as those of a cache with given scales.
"""

import triton
import triton.language as tl

from ...fp8 import encode_fp8, encode_native
from .token_scales import measure


@triton.jit
def encode_fp8_rows(numbers, NATIVE: tl.constexpr):
    """Return the codes of rows as bytes, and the scale of each row.

    The code of NaN is -448, as that of infinity.

    Args:
        numbers: [ROWS, ELEMENTS] float32. Elements past the end of a row are 0.
        NATIVE: `has_fp8_encoding` of the device.

    Returns:
        [ROWS, ELEMENTS] uint8, [ROWS] float32.
    """
    quotient, scale = measure(numbers, 448.0)
    quotient = tl.where(quotient == quotient, quotient, -448.0)
    codes = encode_native(quotient, False) if NATIVE else encode_fp8(quotient, False)
    return codes, scale
