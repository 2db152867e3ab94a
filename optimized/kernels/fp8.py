"""How does a number become one of eight bits?

Eight bits are loaded and stored as they are, as uint8. A chip of compute capability 8.9 or newer
decodes them by an instruction (`NATIVE`). An older one has none, and the interpreter's conversions
are wrong (NaN comes out as 480, subnormals are lost, 448 becomes 256), so there, and for encoding
everywhere, the same numbers come from arithmetic on integers.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.launcher import INTERPRETED


@cache
def has_native_fp8(device: torch.device) -> bool:
    """Tell whether kernels on a device decode FP8 numbers by an instruction."""
    if INTERPRETED:
        return False
    chip = torch.cuda.get_device_properties(device)
    return (chip.major, chip.minor) >= (8, 9)


def scale_arguments(
    scale: Tensor | float | None,
) -> tuple[Tensor | float | None, int | None]:
    """Return a scale and its stride over heads, as `load_scale` takes them.

    A number travels as it is, without a stride: it needs no tensor on the device.
    """
    if scale is None:
        return None, None
    if not isinstance(scale, Tensor):
        return float(scale), None
    return scale, scale.stride(0) if scale.numel() > 1 else 0


@triton.jit
def load_scale(scale, stride, head, is_head):
    """Return a scale: one number, or that of each `head`, of which only `is_head` are read."""
    return (
        scale
        if stride is None
        else tl.load(scale + head * stride, mask=is_head, other=1.0)
    )


@triton.jit
def decode_fp8(bits, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Return the numbers that uint8 `bits` stand for, in float16, which holds each exactly.

    A NaN keeps its sign only where it is not NATIVE.

    Args:
        bits: uint8.
        E5M2: whether they are float8_e5m2; else float8_e4m3fn.
        NATIVE: `has_native_fp8` of the device.
    """
    if NATIVE:
        if E5M2:
            numbers = bits.to(tl.float8e5, bitcast=True).to(tl.float16)
        else:
            numbers = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = bits.to(tl.uint16)
        if E5M2:
            # the upper byte of a float16 is a float8_e5m2
            numbers = (wide << 8).to(tl.float16, bitcast=True)
        else:
            magnitude = wide & 0x7F
            half = (magnitude << 7) | ((wide & 0x80) << 8)
            # its only NaN is all ones; in float16 the fifth bit of the exponent is missing
            half = tl.where(magnitude == 0x7F, half | 0x4000, half)
            # a float16's exponent counts from -15, not -7; subnormals scale along
            numbers = half.to(tl.float16, bitcast=True) * 256.0
    return numbers


@triton.jit
def decode_values(bits, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Return what `decode_fp8` returns, where the numbers are the second factor of a product.

    The compiler would move the conversion behind the change of layout that such a factor needs, and
    there each thread would read single bytes; it leaves a conversion alone that may have effects.
    """
    if not NATIVE:
        numbers = decode_fp8(bits, E5M2, NATIVE)
    elif E5M2:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e5m2x2 $0, low; cvt.rn.f16x2.e5m2x2 $1, high; }",
            "=r,=r,r",
            [bits],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [bits],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    return numbers


@triton.jit
def encode_fp8(numbers, E5M2: tl.constexpr):
    """Return float32 numbers as uint8 bits, rounded to nearest even.

    What lies past the largest number, infinity too, becomes that number. NaN becomes the NaN of
    all ones, with its sign. So these are the bits of torch's `clamp(-largest, largest).to(dtype)`.

    The arithmetic is the same on every chip. The instruction would save little, and for 8.9 triton
    rounds twice on the way to it: first to float16, towards zero.

    Args:
        numbers: float32.
        E5M2: whether to round to float8_e5m2; else to float8_e4m3fn.
    """
    # bits of a float32's mantissa that do not fit, the exponent field of the smallest normal
    # number, and a number whose last bit is worth the smallest subnormal one
    dropped: tl.constexpr = 21 if E5M2 else 20
    smallest: tl.constexpr = 113 if E5M2 else 121
    magic: tl.constexpr = 128.0 if E5M2 else 16384.0
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    # 57344 and 448, as bits: no NaN is left for the arithmetic
    magnitude = tl.minimum(magnitude, 0x47600000 if E5M2 else 0x43E00000)
    # to nearest, and to even where both are as near; a carry moves the exponent on
    even = (magnitude >> dropped) & 1
    normal = (magnitude + even + ((1 << (dropped - 1)) - 1)) >> dropped
    normal -= (smallest - 1) << (23 - dropped)
    # the addition rounds a subnormal number to its place
    shifted = magnitude.to(tl.float32, bitcast=True) + magic
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xFF
    rounded = tl.where(magnitude < (smallest << 23), subnormal, normal)
    rounded = tl.where(is_nan, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
