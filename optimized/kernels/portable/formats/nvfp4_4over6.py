"""nvfp4_4over6: nvfp4 with the better of two scales per block. Reading is the same."""

import triton
import triton.language as tl

from ...fp4 import decode_e2m1
from ...fp8 import decode_fp8
from .nvfp4 import in_pairs, into_blocks, measure_blocks, nearest_codes

LARGEST_SQUARE = tl.constexpr(2.0**100)
"""Bound of a squared error. Where it is exceeded, both scales are 448 and the errors are equal."""


@triton.jit
def encode_4over6(numbers, global_scale):
    """Return what `encode_nvfp4` returns; a block takes the scale with the smaller error."""
    blocks = into_blocks(numbers)
    for_six = measure_blocks(blocks, global_scale, 6.0)
    for_four = measure_blocks(blocks, global_scale, 4.0)
    six = nearest_codes(blocks, for_six, global_scale)
    four = nearest_codes(blocks, for_four, global_scale)
    units = tl.div_rn(blocks, global_scale)
    takes_four = error(units, four, for_four) < error(units, six, for_six)
    codes = tl.where(takes_four[:, :, None], four, six)
    return in_pairs(codes), tl.where(takes_four, for_four, for_six)


@triton.jit
def error(units, codes, scales):
    """Return the sum of the squared errors of each block: [ROWS, BLOCKS] float32.

    It adds pairs of neighbours, then pairs of these sums, and so on, as the reference does. The
    product of a code and a scale is exact. A minimum after each square: a fused multiply-add would
    not round it.

    Args:
        units: [ROWS, BLOCKS, 16] elements divided by the global scale.
        codes, scales: [ROWS, BLOCKS, 16] and [ROWS, BLOCKS].
    """
    found = decode_e2m1(codes).to(tl.float32)
    found *= decode_fp8(scales, False, False).to(tl.float32)[:, :, None]
    off = units - found
    sums = tl.minimum(tl.where(off == off, off * off, 0.0), LARGEST_SQUARE)
    for power in tl.static_range(4):
        pairs = tl.reshape(sums, [units.shape[0], units.shape[1], 8 >> power, 2])
        one, other = tl.split(pairs)
        sums = one + other
    return tl.reshape(sums, [units.shape[0], units.shape[1]])
