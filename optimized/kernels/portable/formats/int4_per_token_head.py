"""int4_per_token_head: rotated rows in codes of four bits, with a scale per token and head.

Keys and values stay rotated. Queries are rotated as the keys were, which keeps dot products, and
results are rotated back once. Levels less the zero point are exact in float16 and bfloat16. The
zero point is in the last four bits of the scale, which is applied as in `token_scales.py`.
"""

import triton
import triton.language as tl

from .fp8 import fit_float16
from .token_scales import SMALLEST_SCALE

SIGNS = tl.constexpr(
    (
        *(0x6573590D, -0x7F7FCA4F, -0x59BBC294, 0x6B7F5438, 0x4AA48B81, -0x54503BBF),
        *(0x320B9848, -0x05DFBC60, 0x4D6E1C33, -0x57563835, 0x1B951DDA, -0x67FC4CA7),
        *(0x3038796E, -0x32D9DFF2, -0x365FDB8A, -0x75625347),
    )
)
"""The signs of 512 channels, the first one in the lowest bit: 1 is +1, and 0 is -1."""


@triton.constexpr_function
def count_channels(size: int) -> int:
    """Return how many channels of a row are rotated together: a power of two up to 512."""
    return min(size & -size, 512)


@triton.jit
def rotate(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows times the signs, transformed.

    Args:
        rows: [ROWS, BLOCK] float32, 0 past the end of a row.
        SIZE: elements of a row.
    """
    return transform(rows * signs(SIZE, BLOCK)[None, :], SIZE, BLOCK)


@triton.jit
def rotate_back(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows that `rotate` turned into these, times the channels of a rotation."""
    return transform(rows, SIZE, BLOCK) * signs(SIZE, BLOCK)[None, :]


@triton.jit
def transform(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the Walsh-Hadamard transform of the channels of each rotation, not normalised."""
    ROWS: tl.constexpr = rows.shape[0]
    # a loop over the strides 1, 2, 4, ... 256
    for power in tl.static_range(9):
        if SIZE % (2 << power) == 0:
            pairs = tl.reshape(rows, [ROWS, BLOCK // (2 << power), 2, 1 << power])
            one, other = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
            pairs = tl.permute(tl.join(one + other, one - other), [0, 1, 3, 2])
            rows = tl.reshape(pairs, [ROWS, BLOCK])
    return rows


@triton.jit
def signs(SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sign of each channel, the same in every rotation: [BLOCK] float32."""
    channel = tl.arange(0, BLOCK) % count_channels(SIZE)
    word = tl.zeros([BLOCK], tl.int32)
    for number in tl.static_range(16):
        if number * 32 < BLOCK:
            word = tl.where(channel // 32 == number, SIGNS[number], word)
    return ((word >> (channel % 32)) & 1) * 2.0 - 1.0


@triton.jit
def group_signs(FIRST: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the signs of CHANNELS channels of a rotation from FIRST on: [CHANNELS] float32.

    Both are multiples of CHANNELS, a power of two up to 32.
    """
    bit = tl.arange(0, CHANNELS) + FIRST % 32
    return ((SIGNS[FIRST // 32] >> bit) & 1) * 2.0 - 1.0


@triton.jit
def encode_int4(
    numbers, dtype, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_ZERO: tl.constexpr
):
    """Return the codes of rows, two in a byte, and the scale of each row with its zero point.

    Args:
        numbers: [ROWS, BLOCK] float32, 0 past the end of a row.
        dtype: of the numbers, to which a rotated row is rounded.
        SIZE: elements of a row.
        HAS_ZERO: whether 0 is always among the levels. vLLM's rule needs no such level.

    Returns:
        [ROWS, BLOCK / 2] uint8, [ROWS] float32.
    """
    rows = round_to(rotate(numbers, SIZE, BLOCK), dtype, False, HAS_ZERO)
    is_number = (rows == rows) & (tl.arange(0, BLOCK) < SIZE)[None, :]
    smallest = tl.min(tl.where(is_number, rows, float("inf")), 1)
    largest = tl.max(tl.where(is_number, rows, -float("inf")), 1)
    inverse, zero_point, scale = measure_levels(smallest, largest, HAS_ZERO)
    levels = to_level(rows * inverse[:, None], zero_point[:, None], False)
    pairs = tl.reshape(levels, [numbers.shape[0], BLOCK // 2, 2])
    low, high = tl.split(pairs)
    return (low | (high << 4)).to(tl.uint8), scale


@triton.jit
def measure_levels(smallest, largest, HAS_ZERO: tl.constexpr):
    """Return the levels of rows: inverse of the step, zero point, and the scale that is stored.

    Args:
        smallest, largest: [ROWS] float32; infinity and -infinity in a row without numbers.
        HAS_ZERO: as in `encode_int4`.

    Returns:
        Each [ROWS] float32. The zero point is in the last four bits of the scale, too.
    """
    has_numbers = smallest <= largest
    smallest = tl.where(has_numbers, smallest, 0.0)
    largest = tl.where(has_numbers, largest, 0.0)
    if HAS_ZERO:
        smallest, largest = tl.minimum(smallest, 0.0), tl.maximum(largest, 0.0)
    # infinity less infinity is NaN
    step = tl.div_rn(largest - smallest, 15.0)
    scale = tl.where(step > SMALLEST_SCALE, step, SMALLEST_SCALE)
    zero_point = to_level(tl.div_rn(-smallest, scale), tl.zeros_like(scale), False)
    bits = (scale.to(tl.int32, bitcast=True) & -16) | zero_point
    scale_and_zero = bits.to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale), zero_point.to(tl.float32), scale_and_zero


@triton.jit
def round_to(numbers, dtype, NATIVE: tl.constexpr, KEEPS_FINITE: tl.constexpr):
    """Return float32 numbers rounded to a dtype, half to even, as float32.

    Args:
        NATIVE: whether an instruction rounds to bfloat16. The interpreter truncates.
        KEEPS_FINITE: whether numbers that float16 does not reach stay as they are.
    """
    if dtype != tl.bfloat16:
        rounded = numbers.to(dtype).to(tl.float32)
        if KEEPS_FINITE and dtype == tl.float16:
            rounded = tl.where(tl.abs(rounded) == float("inf"), numbers, rounded)
        numbers = rounded
    elif NATIVE:
        # a single number is converted at a fourth of the rate
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16;"
            " and.b32 $1, pair, 0xFFFF0000; }",
            "=r,=r,f,f",
            [numbers],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        bits = numbers.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        rounded = rounded.to(tl.float32, bitcast=True)
        numbers = tl.where(numbers == numbers, rounded, numbers)
    return numbers


@triton.jit
def to_level(quotients, zero_point, NATIVE: tl.constexpr):
    """Return the nearest levels from 0 to 15 as int32, half away from zero; that of NaN is 0.

    A maximum before the sum: a fused multiply-add would round once.

    Args:
        NATIVE: whether a maximum leaves NaN out, as on a GPU.
    """
    if not NATIVE:
        quotients = tl.where(quotients == quotients, quotients, -16.0)
    moved = tl.maximum(quotients, -zero_point) + zero_point + 0.5
    return tl.minimum(moved, 15.5).to(tl.int32)


@triton.jit
def split_scales(scales):
    """Return scales without their zero points, and the zero points: each [ROWS] float32."""
    bits = scales.to(tl.int32, bitcast=True)
    return (bits & -16).to(tl.float32, bitcast=True), (bits & 15).to(tl.float32)


@triton.jit
def decode_int4(codes, zero_point, dtype):
    """Return levels less the zero points, each exact: [ROWS, ELEMENTS].

    Args:
        codes: [ROWS, ELEMENTS / 2] bytes.
        zero_point: [ROWS].
    """
    ROWS: tl.constexpr = codes.shape[0]
    ELEMENTS: tl.constexpr = codes.shape[1] * 2
    codes = codes.to(tl.int32)
    levels = tl.reshape(tl.join(codes & 15, (codes >> 4) & 15), [ROWS, ELEMENTS])
    return (levels.to(tl.float32) - zero_point[:, None]).to(dtype)


@triton.jit
def rotate_queries(q, qk_scale, SIZE: tl.constexpr):
    """Return rotated queries as one or two parts, and the scale of their dot products.

    Rounding a rotated query to 16 bits would cost more than the budget of a log-sum-exp. So it is
    the sum of two parts in float16, which have 22 bits. A power of two fits each row to float16.

    Args:
        q: [BLOCK_M, BLOCK_D].
        SIZE: elements of a query.

    Returns:
        The queries, what rounding left, and [BLOCK_M, 1]. For float32 queries, which are not
        rounded, the second one is () and the scale a number.
    """
    inverse: tl.constexpr = 1.0 / count_channels(SIZE)
    rotated = rotate(q.to(tl.float32), SIZE, q.shape[1])
    low = ()
    qk_scale *= inverse
    if q.dtype != tl.float32:
        high, power = fit_float16(rotated)
        low = (rotated / power[:, None] - high.to(tl.float32)).to(tl.float16)
        rotated = high
        qk_scale = (qk_scale * power)[:, None]
    return rotated, low, qk_scale


@triton.jit
def rotate_values(result, SIZE: tl.constexpr):
    """Return finished rows, rotated back: [BLOCK_M, BLOCK_DV]."""
    inverse: tl.constexpr = 1.0 / count_channels(SIZE)
    return rotate_back(result, SIZE, result.shape[1]) * inverse
