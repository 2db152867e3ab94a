"""Online softmax of the Hopper prefill kernel: masking, running maximum and sum, exponentials.

Registers hold a row of qk in four threads, two neighbouring columns of every eight per thread. So
each thread reduces its own columns first, and the sum over the four threads waits until the end.
Source: FlashAttention-4 for the exponential without the special-function unit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import WARPGROUP_M
from .tile_range import end_of_visible_keys, first_visible_key
from .traits import (
    MASK_BEGIN,
    MASK_END,
    has_upper_bound,
    p_operand_layout,
    qk_layout,
)
from .work_item import find_token


def _exp2_of_8() -> str:
    """Return PTX for 2**x of eight numbers x <= 0: seven by the MUFU unit, one by a polynomial.

    The softmax waits for the MUFU unit. With one in eight off it, 1 x 8,192 takes 4 % less time at
    head size 128 (912 to 873 us). One in sixteen gives 886 us, one in four gives the gain back
    (908 us). At head size 64 every share loses, for lack of issue slots and registers. The quartic
    takes 0.5 to 0.8 % longer than the cubic of these figures.

    The polynomial: adding 1.5 * 2**23 rounds x down and leaves the whole part in the low bits,
    from where it is shifted to the exponent. The fraction f goes through 1 + c1 f + c2 f^2 +
    c3 f^3 + c4 f^4, the quartic with the smallest largest relative error on [0, 1] among those that
    are 1 at 0 and 2 at 1. That error is 3.4e-6. A cubic's is 1.03e-4, which a log-sum-exp's budget
    does not hold if few keys have most of the weight. The value at 1 matters because x of the
    largest score may be rounded to just below 0, where f is just below 1.
    """
    # 0.01355575, 0.05203237, 0.24137976, 0.69303212, 1.0 and -127.0 and 1.5 * 2**23
    quartic = ("0f3C5E18ED", "0f3D551FE5", "0f3E772C42", "0f3F316A8E", "0f3F800000")
    by_mufu = [f"ex2.approx.ftz.f32 ${number}, ${number + 8};" for number in range(7)]
    by_polynomial = [
        "max.ftz.f32 x, $15, 0fC2FE0000;",
        "add.rm.ftz.f32 down, x, 0f4B400000;",
        "sub.rn.ftz.f32 whole, down, 0f4B400000;",
        "sub.rn.ftz.f32 x, x, whole;",
        f"fma.rn.ftz.f32 power, x, {quartic[0]}, {quartic[1]};",
        *(f"fma.rn.ftz.f32 power, power, x, {factor};" for factor in quartic[2:]),
        "mov.b32 exponent, down;",
        "shl.b32 exponent, exponent, 23;",
        "mov.b32 bits, power;",
        "add.s32 bits, bits, exponent;",
        "mov.b32 $7, bits;",
    ]
    registers = [".reg .f32 x, down, whole, power;", ".reg .b32 exponent, bits;"]
    return "\n".join(["{", *registers, *by_mufu, *by_polynomial, "}"])


EXP2_OF_8_PTX = gl.constexpr(_exp2_of_8())
EXP2_OF_8_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))
ROUND_PAIR_TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
ROUND_PAIR_TO_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
SPLIT_PAIR = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.jit
def mask_qk(qk, kv_tile, position, seq_len, MASKS: gl.constexpr, config: gl.constexpr):
    """Set the dot products with keys that are not visible to -inf.

    Args:
        qk: [WARPGROUP_M, BLOCK_N].
        kv_tile: index of the KV tile.
        position: position of the warpgroup's first row.
        seq_len: keys of the sequence.
        MASKS: MASK_END, MASK_BEGIN, or their sum.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    LAYOUT: gl.constexpr = qk_layout(BLOCK_N)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))  # [BLOCK_N]
    end = gl.full([WARPGROUP_M], seq_len, gl.int32, ROWS)  # [WARPGROUP_M]
    row = gl.arange(0, WARPGROUP_M, ROWS)
    row_position = position + find_token(row, config)  # [WARPGROUP_M]
    if has_upper_bound(config):
        end = gl.minimum(end_of_visible_keys(row_position, config), seq_len)
    # relative to the tile, because then the columns are constants
    end -= kv_tile * BLOCK_N
    if MASKS & MASK_END:
        qk = gl.where(column[None, :] < end[:, None], qk, -float("inf"))
    if MASKS & MASK_BEGIN:
        begin = first_visible_key(row_position, config) - kv_tile * BLOCK_N
        qk = gl.where(column[None, :] >= begin[:, None], qk, -float("inf"))
    return qk


@gluon.jit
def online_softmax(
    qk,
    m_i,
    l_i,
    scale_log2,
    FIRST: gl.constexpr,
    MASKED: gl.constexpr,
    USE_POLYNOMIAL: gl.constexpr,
    ROUNDS_ALIKE: gl.constexpr,
    PARTS: gl.constexpr = 4,
    HAS_ROW_SCALES: gl.constexpr = False,
):
    """Return p, alpha, and the new m_i and l_i.

    Args:
        qk: [WARPGROUP_M, BLOCK_N] dot products before the scale.
        m_i: [WARPGROUP_M] running maximum before the scale.
        l_i: [WARPGROUP_M, 4] running sum, one share per thread of a row.
        scale_log2: the scale times log2(e).
        FIRST: whether this is the first KV tile of the rows; then `l_i` is not read.
        MASKED: whether a row may have had no visible key so far.
        USE_POLYNOMIAL: whether one exponential in eight avoids the MUFU unit.
        ROUNDS_ALIKE: whether sums name the product that they fuse, so that a row is rounded alike
            wherever this is compiled.
        PARTS: parts of a row that are reduced before their results are. Latent decodes are faster
            with two, head size 256 with four (`docs/kernel_notes.md`).
        HAS_ROW_SCALES: whether `scale_log2` is [WARPGROUP_M].
    Returns:
        p: [WARPGROUP_M, BLOCK_N] 2 ** ((qk - m_i) * scale_log2).
        alpha: [WARPGROUP_M] factor for the accumulator and sum of earlier tiles.
        m_i, l_i: as above.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout(qk.shape[1]))
    m_new = gl.max(_reduce_columns(qk, PARTS, True), 1)  # [WARPGROUP_M]
    m_new = gl.convert_layout(m_new, ROWS, assert_trivial=True)
    m_new = gl.maximum(m_i, m_new)
    # a row without a visible key so far has the maximum -inf, and -inf - -inf = NaN
    shift = gl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
    alpha = gl.exp2((m_i - shift) * scale_log2)  # [WARPGROUP_M]
    if ROUNDS_ALIKE:
        shift = gl.expand_dims(shift * scale_log2, 1)  # [WARPGROUP_M, 1]
        scales = gl.full(qk.shape, scale_log2, gl.float32, qk.type.layout)
        qk = gl.fma(qk, scales, gl.broadcast(-shift, qk)[0])
    elif HAS_ROW_SCALES:
        qk = qk * scale_log2[:, None] - (shift * scale_log2)[:, None]
    else:
        qk = qk * scale_log2 - (shift * scale_log2)[:, None]
    if USE_POLYNOMIAL:
        p = gl.inline_asm_elementwise(
            EXP2_OF_8_PTX,
            EXP2_OF_8_CONSTRAINTS,
            [qk],
            dtype=gl.float32,
            is_pure=True,
            pack=8,
        )
    else:
        p = gl.exp2(qk)
    l_new = _reduce_columns(p, PARTS, False)  # [WARPGROUP_M, 4]
    if not FIRST:
        SUM_ROWS: gl.constexpr = gl.SliceLayout(1, l_new.type.layout)
        alpha_of_sum = gl.convert_layout(alpha, SUM_ROWS, assert_trivial=True)
        if ROUNDS_ALIKE:
            alpha_of_sum = gl.broadcast(gl.expand_dims(alpha_of_sum, 1), l_i)[0]
            l_new = gl.fma(l_i, alpha_of_sum, l_new)
        else:
            l_new = l_i * gl.expand_dims(alpha_of_sum, 1) + l_new
    return p, alpha, m_new, l_new


@gluon.jit
def _reduce_columns(qk, PARTS: gl.constexpr, TAKE_MAX: gl.constexpr):
    """Return each thread's maximum or sum of its own columns.  # [WARPGROUP_M, 4]

    Reductions over registers alone form a tree and need no shuffle.
    """
    BLOCK_N: gl.constexpr = qk.shape[1]
    # columns are [part of the tile, eight columns, thread, neighbour]
    qk = gl.reshape(qk, [WARPGROUP_M, PARTS, BLOCK_N // PARTS // 8, 4, 2])
    if TAKE_MAX:
        return gl.max(gl.max(gl.max(qk, 4), 2), 1)
    return gl.sum(gl.sum(gl.sum(qk, 4), 2), 1)


@gluon.jit
def rescale(acc, factor):
    """Return the accumulator's parts times a factor per row.  # [WARPGROUP_M, columns] each"""
    parts = ()
    for i in gl.static_range(len(acc)):
        parts = parts + (_rescale_part(acc[i], factor),)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@gluon.jit
def _rescale_part(acc, factor):
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(factor, ROWS)[:, None]


@gluon.jit
def round_p(p, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Return p rounded to `dtype`, as the left operand of P @ V with so many columns."""
    return gl.convert_layout(p.to(dtype), p_operand_layout(COLUMNS))


@gluon.jit
def pack_p(p, dtype: gl.constexpr):
    """Return p rounded to `dtype`, two neighbours per word.  # [WARPGROUP_M, BLOCK_N // 2]

    A loop that carries 16-bit numbers unpacks and packs every word (64 PRMT instructions per
    tile); one that carries words does not.
    """
    left, right = gl.split(gl.reshape(p, [WARPGROUP_M, p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        ROUND_PAIR_TO_BF16 if dtype == gl.bfloat16 else ROUND_PAIR_TO_FP16,
        "=r,f,f",
        [left, right],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack_p(words, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the p of `pack_p` as the left operand of P @ V.  # [WARPGROUP_M, BLOCK_N]"""
    left, right = gl.inline_asm_elementwise(
        SPLIT_PAIR,
        "=h,=h,r",
        [words],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    p = gl.reshape(gl.join(left, right), [WARPGROUP_M, 2 * words.shape[1]])
    return gl.convert_layout(p.to(dtype, bitcast=True), p_operand_layout(COLUMNS))
