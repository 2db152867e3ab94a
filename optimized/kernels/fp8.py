"""FP8 numbers in kernels: decoding to float16, encoding from float32, and scales.

FP8 numbers are loaded and stored as uint8. A chip of compute capability 8.9 or newer decodes them
by an instruction (`NATIVE`), and one of 9.0 or newer encodes them by one too. Older ones have none,
and the interpreter's conversions are wrong: NaN becomes 480, subnormals are lost, 448 becomes 256.
There the same numbers come from integer arithmetic.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ..runtime.launcher import INTERPRETED


class SlotStrides(NamedTuple):
    """Strides of scales [num_blocks, block_size, kv_heads], one per slot and head."""

    block: Any
    slot: Any
    head: Any


class BlockStrides(NamedTuple):
    """Strides of scales [num_blocks, block_size, kv_heads, parts], one per block of channels."""

    block: Any
    slot: Any
    head: Any
    part: Any


class ScaleStrides(NamedTuple):
    """Strides of the scales of keys, values and output.

    None for a number, a stride over heads, SlotStrides, or BlockStrides.
    """

    k: Any
    v: Any
    out: Any


@cache
def has_native_fp8(device: torch.device) -> bool:
    """Return whether kernels on a device decode FP8 numbers by an instruction."""
    if INTERPRETED:
        return False
    chip = torch.cuda.get_device_properties(device)
    return (chip.major, chip.minor) >= (8, 9)


@cache
def has_fp8_encoding(device: torch.device) -> bool:
    """Return whether kernels on a device encode FP8 numbers by an instruction.

    For compute capability 8.9 triton rounds twice: first to float16, towards zero.
    """
    return not INTERPRETED and torch.cuda.get_device_properties(device).major >= 9


def scale_arguments(
    scale: Tensor | float | None,
) -> tuple[Tensor | float | None, int | SlotStrides | BlockStrides | None]:
    """Return a scale and its stride over heads, as `load_scale` takes them.

    A number is passed by value, without a stride. A scale per slot has SlotStrides, and those of
    blocks of channels, which are passed as bytes, have BlockStrides.
    """
    if scale is None:
        return None, None
    if not isinstance(scale, Tensor):
        return float(scale), None
    if scale.dim() == 3:
        return scale, SlotStrides(*scale.stride())
    if scale.dim() == 4:
        return scale.view(torch.uint8), BlockStrides(*scale.stride())
    return scale, scale.stride(0) if scale.numel() > 1 else 0


def scale_strides(options: AttentionOptions) -> ScaleStrides:
    """Return the strides of the scales of one plan."""
    return ScaleStrides(
        k=scale_arguments(options.k_scale)[1],
        v=scale_arguments(options.v_scale)[1],
        out=scale_arguments(options.out_scale)[1],
    )


@triton.jit
def load_scale(scale, stride, head, is_head):
    """Return the scale of each head. Only those of `is_head` are read, others are 1."""
    return (
        scale
        if stride is None
        else tl.load(scale + head * stride, mask=is_head, other=1.0)
    )


@triton.jit
def decode_fp8(bits, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Return FP8 numbers as float16, which represents each of them exactly.

    A NaN keeps its sign only if not NATIVE.

    Args:
        bits: the numbers as uint8.
        E5M2: whether they are float8_e5m2; otherwise float8_e4m3fn.
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
            # the only NaN is all ones; of float16's NaN one more bit of the exponent is set
            half = tl.where(magnitude == 0x7F, half | 0x4000, half)
            # float16's exponent bias is 15, not 7; subnormals scale too
            numbers = half.to(tl.float16, bitcast=True) * 256.0
    return numbers


@triton.jit
def decode_fp8_pinned(bits, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Return what `decode_fp8` returns, for numbers that are the second operand of a product.

    The compiler would move the conversion past the layout change that such an operand needs. There
    each thread would read single bytes. It does not move a conversion that may have side effects.
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
    """Return float32 numbers as FP8 numbers in uint8, rounded to nearest even.

    Numbers beyond the largest one, infinity included, become that one. NaN becomes the NaN of all
    ones, with its sign. These are the bits of torch's `clamp(-largest, largest).to(dtype)`.

    The arithmetic is the same on every chip.

    Args:
        numbers: float32.
        E5M2: whether to round to float8_e5m2; otherwise to float8_e4m3fn.
    """
    # bits of a float32's mantissa that are dropped, the exponent field of the smallest normal
    # number, and a number whose last bit has the value of the smallest subnormal one
    dropped: tl.constexpr = 21 if E5M2 else 20
    smallest: tl.constexpr = 113 if E5M2 else 121
    magic: tl.constexpr = 128.0 if E5M2 else 16384.0
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    # 57344 and 448 as bits; this removes NaN from the arithmetic
    magnitude = tl.minimum(magnitude, 0x47600000 if E5M2 else 0x43E00000)
    # to nearest, ties to even; a carry increments the exponent
    even = (magnitude >> dropped) & 1
    normal = (magnitude + even + ((1 << (dropped - 1)) - 1)) >> dropped
    normal -= (smallest - 1) << (23 - dropped)
    # the addition rounds a subnormal number
    shifted = magnitude.to(tl.float32, bitcast=True) + magic
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xFF
    rounded = tl.where(magnitude < (smallest << 23), subnormal, normal)
    rounded = tl.where(is_nan, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


PLAIN_SCALES = tl.constexpr((2.0**-60, 2.0**60))
"""Scales for which `divide` is exact."""
LARGEST_QUOTIENT = tl.constexpr(2.0**20)
"""A quotient that exceeds every FP8 number."""


@triton.jit
def are_plain(scale, IS_NUMBER: tl.constexpr):
    """Return whether all scales are PLAIN_SCALES. IS_NUMBER: `scale` is one number, no tensor."""
    is_plain = (scale >= PLAIN_SCALES[0]) & (scale <= PLAIN_SCALES[1])
    return is_plain if IS_NUMBER else tl.min(is_plain.to(tl.int32), 0) != 0


@triton.jit
def quantise(
    numbers, scale, E5M2: tl.constexpr, NATIVE: tl.constexpr, IS_NUMBER: tl.constexpr
):
    """Return numbers / scale as FP8 numbers in uint8.

    These are the bits of torch's `(numbers / scale).clamp(-largest, largest).to(dtype)`, except
    for the sign of NaN. In the code for sm_90 a cache write has 39 instructions per element with a
    division of any numbers, its rare path included, and `encode_fp8`. With NATIVE and plain scales
    it runs about 15.

    Args:
        numbers: float32.
        scale: float32; a tensor has as many dimensions as `numbers`, or those at its end.
        E5M2: whether to round to float8_e5m2; otherwise to float8_e4m3fn.
        NATIVE: `has_fp8_encoding` of the device.
        IS_NUMBER: whether `scale` is one number, no tensor.
    """
    if NATIVE:
        if are_plain(scale, IS_NUMBER):
            codes = _quantise_plain(numbers, scale, E5M2)
        else:
            codes = encode_fp8(tl.div_rn(numbers, scale), E5M2)
    else:
        codes = encode_fp8(tl.div_rn(numbers, scale), E5M2)
    return codes


@triton.jit
def _quantise_plain(numbers, scale, E5M2: tl.constexpr):
    """Return what `quantise` returns, by the instruction. Scales are PLAIN_SCALES.

    The sign is added before the codes are made, see `encode_native`.
    """
    magnitude = divide(tl.abs(numbers), scale).to(tl.int32, bitcast=True)
    sign = numbers.to(tl.int32, bitcast=True) & -0x80000000
    return encode_native((magnitude | sign).to(tl.float32, bitcast=True), E5M2)


@triton.jit
def encode_native(numbers, E5M2: tl.constexpr):
    """Return what `encode_fp8` returns but for the sign of NaN, by the instruction.

    It returns two codes. Where a program had two elements per thread, and computed with their
    codes, the assemblers of triton 3.6 and 3.7 read the second code before it existed. So four
    codes are made and moved at once.
    """
    if E5M2:
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [numbers],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
        # of the NaNs of this dtype, the one of all ones
        codes = tl.where(numbers == numbers, codes, 0x7F).to(tl.uint8)
    else:
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [numbers],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return codes


@triton.jit
def divide(magnitude, scale):
    """Return magnitude / scale in float32, rounded to nearest even.

    Quotients beyond LARGEST_QUOTIENT become that number, and NaN stays NaN. Below 2**-20, where
    every FP8 number is 0, the last bit may differ. A remainder that is computed by a fused
    multiply-add is exact. The first one corrects the quotient to one unit of its last place, and
    the second one to the nearest number, because the inverse is rounded to nearest.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
    IBM Journal of Research and Development 34(1), 1990.

    Args:
        magnitude: float32, not negative.
        scale: float32, PLAIN_SCALES.
    """
    largest = scale * LARGEST_QUOTIENT
    magnitude = tl.minimum(magnitude, largest, propagate_nan=tl.PropagateNan.ALL)
    inverse, minus = tl.div_rn(1.0, scale), -scale
    quotient = magnitude * inverse
    remainder = tl.fma(quotient, minus, magnitude)
    quotient = tl.fma(remainder, inverse, quotient)
    remainder = tl.fma(quotient, minus, magnitude)
    return tl.fma(remainder, inverse, quotient)
