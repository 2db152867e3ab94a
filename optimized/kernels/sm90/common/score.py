"""Score modification of the Hopper prefill kernel: the soft cap, and the scale of the softmax.

A score is the scaled dot product. The online softmax takes numbers before their scale, so a soft
cap replaces both: with the cap c, the number is tanh(score / c) and its scale is c.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import LN_2, LOG2_E
from .traits import qk_layout


class ScoreArgs(NamedTuple):
    """What turns dot products into scores.

    Args:
        scale_log2: scale of the dot products times log2(e), positive.
        sinks: Optional. [heads] float32 score per head that has no value. If None, there is none.
        k_scales, v_scales: Optional. [heads] float32 factor per query head of its keys and of its
            values, the same for the query heads of a KV head. If None, they are 1.
        key_factors: Optional. [kv_heads, keys] float32 factor of each key. If None, they are 1.
    """

    scale_log2: Any
    sinks: Any
    k_scales: Any = None
    v_scales: Any = None
    key_factors: Any = None


CLAMP = gl.constexpr(
    "max.NaN.ftz.f32 $0, $1, 0fC1000000; min.NaN.ftz.f32 $0, $0, 0f41000000;"
)
"""PTX that limits a number to -8 ... 8, where tanh is 1 to float32. NaN stays NaN."""
TANH = gl.constexpr("tanh.approx.f32 $0, $1;")
"""PTX of tanh with a relative error of 2 ** -11, an eighth of the largest error of rounding a score
to bfloat16."""
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@gluon.jit
def softmax_scale(scale_log2, config: gl.constexpr):
    """Return the scale of the numbers of `modify_scores` times log2(e)."""
    if config.SOFT_CAP > 0:
        return config.SOFT_CAP * LOG2_E
    else:  # noqa: RET505 (a constexpr branch)
        return scale_log2


@gluon.jit
def load_factors(factors, kv_tile, config: gl.constexpr):
    """Return the factors of a KV tile's keys, [BLOCK_N]; None without factors.

    Args:
        factors: Optional. Pointer to a factor of each key of the sequence.
        kv_tile: index of the KV tile.
    """
    found = None
    if factors is not None:
        BLOCK_N: gl.constexpr = config.BLOCK_N
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, qk_layout(BLOCK_N)))
        found = gl.load(factors + kv_tile * BLOCK_N + column)
    return found


@gluon.jit
def modify_scores(qk, scale_log2, factors, config: gl.constexpr):
    """Return the numbers that the softmax takes: dot products, or with a soft cap tanh.

    Args:
        qk: [WARPGROUP_M, BLOCK_N] dot products.
        scale_log2: their scale times log2(e); [WARPGROUP_M] with FITS_QUERIES.
        factors: Optional. [BLOCK_N] factors of the keys. If None, they are 1.
    """
    if factors is not None:
        qk = qk * factors[None, :]
    if config.SOFT_CAP > 0:
        scale = scale_log2 * (LN_2 / config.SOFT_CAP)
        if config.FITS_QUERIES:
            scale = scale[:, None]
        qk = qk * scale
        if config.FAST_TANH:
            qk = gl.inline_asm_elementwise(
                TANH, "=f,f", [qk], dtype=gl.float32, is_pure=True, pack=1
            )
        else:
            qk = _tanh(qk)
    return qk


@gluon.jit
def _tanh(x):
    """Return tanh(x) as a quotient of polynomials, with one MUFU instruction per element.

    Its largest relative error is 2.9e-7 in float32, also near 0, where 1 - 2 / (e^2x + 1) loses
    digits. tanh.approx has a relative error of 5e-4. At a cap of 50 that changes a log-sum-exp by
    up to 0.025, where the error budget allows about 1e-5. It also exceeds the budget of float16
    outputs, which is eight times smaller than that of bfloat16.
    The coefficients minimize the largest relative error on [0, 8].
    """
    x = gl.inline_asm_elementwise(
        CLAMP, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
    square = x * x
    top = square * 1.523104821780904e-08 + 2.1895137621338966e-05
    top = square * top + 0.003571627801030887
    top = square * top + 0.13444523352417886
    top = square * top + 0.9999999936188424
    bottom = square * 8.52271087559265e-07 + 0.0003411340099225437
    bottom = square * bottom + 0.02616455714020247
    bottom = square * bottom + 0.46777850693697703
    bottom = square * bottom + 1.0
    reciprocal = gl.inline_asm_elementwise(
        RECIPROCAL, "=f,f", [bottom], dtype=gl.float32, is_pure=True, pack=1
    )
    return x * top * reciprocal
