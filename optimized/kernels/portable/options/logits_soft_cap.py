"""Soft cap: a scaled score s becomes c * tanh(s / c)."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Return tanh(x), accurate to a few roundings for small x, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -far, far))


@triton.jit
def cap_scores(qk, qk_scale, SOFT_CAP: tl.constexpr):
    """Return scaled and capped scores: [BLOCK_M, BLOCK_N]."""
    return SOFT_CAP * tanh(qk * (qk_scale / SOFT_CAP))
