"""The rotation of int4_per_token_head, undone for a tile of rows on tensor cores.

portable/formats/int4_per_token_head.py has the rule, and the signs. The transform of n channels is
one of n / 2: of the sums of neighbours for even channels, and of their differences for odd ones. A
byte has two neighbours. So codes are not interleaved, and the products have a quarter of the size.

It is exact. Levels less the zero point are integers up to 15 in size, the operands up to 30, and
their sums up to 15 times the channels of a rotation.
"""

import triton
import triton.language as tl

from ...portable.formats.int4_per_token_head import count_channels, signs


@triton.jit
def transform_matrix(SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the matrix of the Walsh-Hadamard transform of each CHANNELS of SIZE elements.

    Returns:
        [SIZE, SIZE] float16: 1 and -1, and 0 for elements of different transforms.
    """
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    common = row & column & (CHANNELS - 1)
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    number = 1 - 2 * (common & 1)
    if CHANNELS < SIZE:
        number = tl.where(row // CHANNELS == column // CHANNELS, number, 0)
    return number.to(tl.float16)


@triton.jit
def decode_rotated(codes, zero_point, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return levels less the zero point, rotated back, times the channels of a rotation.

    Args:
        codes: [ROWS, BLOCK / 2] bytes.
        zero_point: [ROWS] float32.
        SIZE: elements of a row.

    Returns:
        [ROWS, BLOCK] integers in float32.
    """
    ROWS: tl.constexpr = codes.shape[0]
    codes = codes.to(tl.int32)
    low, high = codes & 15, codes >> 4
    sums = (low + high).to(tl.float32) - (2.0 * zero_point)[:, None]
    matrix = transform_matrix(BLOCK // 2, count_channels(SIZE) // 2)
    even = tl.dot(sums.to(tl.float16), matrix)
    odd = tl.dot((low - high).to(tl.float16), matrix)
    rows = tl.reshape(tl.join(even, odd), [ROWS, BLOCK])
    return rows * signs(SIZE, BLOCK)[None, :]
