"""FP4 numbers in kernels: float4_e2m1 codes from float32, and their meaning in float16.

The arithmetic is the same on every chip. Two codes are in a byte.
"""

import triton
import triton.language as tl


@triton.jit
def encode_e2m1(numbers):
    """Return codes of four bits as int32, rounded to nearest, half to the even code. NaN is 6."""
    is_nan = numbers != numbers
    size = tl.where(is_nan, 6.0, tl.abs(numbers))
    code = (size > 0.25).to(tl.int32)
    code += (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (numbers.to(tl.int32, bitcast=True) >> 28) & 8
    return code | tl.where(is_nan, 0, sign)


@triton.jit
def decode_e2m1(codes):
    """Return what codes of four bits mean, in float16.

    The bits of the size are the lowest of float16's exponent and the highest of its mantissa.
    """
    wide = codes.to(tl.uint16)
    half = ((wide & 7) << 9) | ((wide & 8) << 12)
    return half.to(tl.float16, bitcast=True) * 16384.0
