"""The rotation of int4_per_token_head as a product with the matrix of the transform.

portable/formats/int4_per_token_head.py has the rule, and the signs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...portable.formats.int4_per_token_head import SIGNS
from .config import rotation_layout


@gluon.jit
def _signs(channel, D: gl.constexpr):
    """Return the sign of each channel of a rotation of D channels: 1 or -1 in float32."""
    word = channel * 0
    for number in gl.static_range(D // 32):
        word = gl.where(channel // 32 == number, SIGNS[number], word)
    return ((word >> (channel % 32)) & 1).to(gl.float32) * 2.0 - 1.0


@gluon.jit
def _transform(D: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the matrix of the Walsh-Hadamard transform, [D, D] of 1 and -1."""
    row = gl.arange(0, D, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    common = row[:, None] & column[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(dtype)


@gluon.jit
def rotate(rows, WARPS: gl.constexpr):
    """Return rotated rows: [D, ROWS] float32, in `rotation_layout`.

    Args:
        rows: [D, ROWS] float16 or bfloat16, in the layout of a right operand.
    """
    D: gl.constexpr = rows.shape[0]
    product: gl.constexpr = rotation_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    channel = gl.arange(0, D, gl.SliceLayout(1, right))
    rows = (rows.to(gl.float32) * _signs(channel, D)[:, None]).to(rows.dtype)
    result = gl.full([D, rows.shape[1]], 0.0, gl.float32, product)
    return mma_v2(_transform(D, rows.dtype, left), rows, result)


@gluon.jit
def rotate_back(rows, WARPS: gl.constexpr):
    """Return the rows that rotation turned into these: [D, ROWS] float32, in `rotation_layout`.

    They are the sum of three parts in bfloat16, whose products are exact.
    """
    D: gl.constexpr = rows.shape[0]
    product: gl.constexpr = rotation_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    matrix = _transform(D, gl.bfloat16, left)
    rest = gl.convert_layout(rows, right)
    result = gl.full([D, rows.shape[1]], 0.0, gl.float32, product)
    for _ in gl.static_range(3):
        part = rest.to(gl.bfloat16)
        rest -= part.to(gl.float32)
        result = mma_v2(matrix, part, result)
    channel = gl.arange(0, D, gl.SliceLayout(1, product))
    return result * (_signs(channel, D) * (1.0 / D))[:, None]
