"""The queries of a tile as right operand of K @ Q, in the order in which threads hold keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...fp8 import load_scale
from ...portable.formats.fp8 import fit_float16
from .config import has_levels, has_slot_scales, rotation_layout, words_at_once
from .rotation import rotate


@gluon.jit
def number_elements(index, config: gl.constexpr):
    """Return which element of a head is element `index` of the operands of K @ Q.

    Element 16 r + 8 u + 2 t + o is code 2 u + o of a word of lane t, or u + 2 o of levels. With VEC
    words that are loaded at once and r = e VEC + w, it is word e 4 VEC + t VEC + w of the head.
    """
    VEC: gl.constexpr = words_at_once(4, config.ALIGNMENT, True)
    upper, odd = index % 16 // 8, index % 2
    code = upper + odd * 2 if has_levels(config.CACHE_FORMAT) else upper * 2 + odd
    lane, step = index % 8 // 2, index // 16
    return (step // VEC * (4 * VEC) + lane * VEC + step % VEC) * 4 + code


@gluon.jit
def load_rows(call, rows, d):
    """Return elements `d` of the queries of a tile: [elements, ROWS]. Other rows are 0."""
    strides = call.strides
    return gl.load(
        call.tensors.q
        + (rows.token_index.to(gl.int64) * strides.q_token)[None, :]
        + (rows.head.to(gl.int64) * strides.q_head)[None, :]
        + (d * strides.q_element)[:, None],
        mask=rows.is_row[None, :] & (d >= 0)[:, None],
        other=0.0,
    )


@gluon.jit
def load_q(
    call,
    rows,
    kv_head,
    operand: gl.constexpr,
    WARPS: gl.constexpr,
    config: gl.constexpr,
):
    """Return the queries of a tile, their sums, and the scale of their dot products.

    portable/formats/fp8.py has the division by a power of two.

    Args:
        rows: QueryRows, in the layout of the operand's rows.
        operand: register layout of a right operand of K @ Q.

    Returns:
        [WARPS, D, ROWS] float16; [ROWS] sums if elements are levels, () otherwise; [ROWS].
    """
    D: gl.constexpr = config.BLOCK_D
    of_tile: gl.constexpr = gl.SliceLayout(0, operand)
    index = gl.arange(0, D, gl.SliceLayout(1, of_tile))
    q = load_rows(call, rows, number_elements(index, config))
    q, power = fit_float16(q.permute([1, 0]))
    scale = power * call.scale
    total = ()
    if has_levels(config.CACHE_FORMAT):
        total = gl.sum(q.to(gl.float32), 1)
    if not has_slot_scales(config.CACHE_FORMAT):
        k_scale = call.option_tensors.k_scale
        scale *= load_scale(k_scale, call.scale_strides.k, kv_head, True)
    return for_all_warps(q.permute([1, 0]), operand, WARPS), total, scale


@gluon.jit
def load_rotated_q(
    call, rows, operand: gl.constexpr, WARPS: gl.constexpr, config: gl.constexpr
):
    """Return the rotated queries of a tile as two parts, their sums, and the scale of products.

    portable/formats/int4_per_token_head.py says why there are two. Those of codes in the upper half
    of a byte are a 16th (codes.py); times 1,024, none of them is subnormal for that.

    Args:
        rows: QueryRows, in the layout of the rows of a right operand of the rotation.
        operand: register layout of a right operand of K @ Q.

    Returns:
        [WARPS, D, ROWS] float16, what rounding left, [ROWS] and [ROWS].
    """
    D: gl.constexpr = config.BLOCK_D
    right: gl.constexpr = gl.DotOperandLayout(1, rotation_layout(WARPS), 2)
    channel = gl.arange(0, D, gl.SliceLayout(1, right))
    rotated = rotate(load_rows(call, rows, channel), WARPS).permute([1, 0])
    largest = gl.max(gl.abs(rotated), 1)  # [ROWS]
    power = gl.exp2(gl.ceil(gl.log2(gl.maximum(largest, 2.0**-100))) - 10.0)
    rotated = rotated / power[:, None]
    total = gl.sum(rotated, 1)
    rotated = order_elements(rotated, config)
    index = gl.arange(0, D, gl.SliceLayout(1, rotated.type.layout))
    # bit 3 of an index tells whether a code is in the upper half of its byte
    rotated = rotated * gl.where(index % 16 < 8, 1.0, 0.0625)[:, None]
    high = rotated.to(gl.float16)
    low = (rotated - high.to(gl.float32)).to(gl.float16)
    high = for_all_warps(high, operand, WARPS)
    return high, for_all_warps(low, operand, WARPS), total, power * (call.scale / D)


@gluon.jit
def order_elements(rows, config: gl.constexpr):
    """Return rows with their elements in the order in which threads hold words of eight codes.

    Element 16 r + 8 u + 2 t + o is code 4 o + 2 m + u of a word of lane t, and r = 2 (e VEC + w) +
    m, with the words of `number_elements`.

    Args:
        rows: [ROWS, D]. The result is [D, ROWS].
    """
    ROWS: gl.constexpr = rows.shape[0]
    D: gl.constexpr = rows.shape[1]
    VEC: gl.constexpr = words_at_once(D // 32, config.ALIGNMENT, True)
    # words apart, lane, word, odd element, upper step, upper pair
    rows = rows.reshape([ROWS, D // (32 * VEC), 4, VEC, 2, 2, 2])
    return rows.permute([1, 3, 5, 6, 2, 4, 0]).reshape([D, ROWS])


@gluon.jit
def for_all_warps(q, operand: gl.constexpr, WARPS: gl.constexpr):
    """Return the same queries in each warp: [WARPS, D, ROWS]."""
    q = gl.convert_layout(q, gl.SliceLayout(0, operand))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, operand)))
    q, _ = gl.broadcast(q[None, :, :], (warp * 0)[:, None, None].to(gl.float16))
    return q
