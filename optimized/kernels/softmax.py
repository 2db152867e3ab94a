"""Online softmax: running maximum m_i, running sum l_i and accumulator acc, in base 2.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def start_softmax(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Return acc, [BLOCK_M, BLOCK_DV], l_i and m_i, [BLOCK_M], of rows without a score."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    return acc, l_i, m_i


@triton.jit
def finite(m_i):
    """Return m_i, with 0 for -inf: a row without a visible key, where -inf - -inf is NaN."""
    return tl.where(m_i == -float("inf"), 0.0, m_i)


@triton.jit
def update_softmax(acc, l_i, m_i, qk, MASKED: tl.constexpr):
    """Return the weights of one more tile of scores, and the rescaled running values.

    Args:
        acc: [BLOCK_M, BLOCK_DV] sum of the weighted values.
        l_i, m_i: [BLOCK_M].
        qk: [BLOCK_M, BLOCK_N] scores in base 2.
        MASKED: whether scores may be -inf.

    Returns:
        p: [BLOCK_M, BLOCK_N] weights.
        acc, l_i, m_i: rescaled; the weights are in l_i, and not yet in acc.
    """
    m_new = tl.maximum(m_i, tl.max(qk, 1))  # [BLOCK_M]
    shift = finite(m_new) if MASKED else m_new
    alpha = tl.exp2(m_i - shift)  # [BLOCK_M]
    p = tl.exp2(qk - shift[:, None])  # [BLOCK_M, BLOCK_N]
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    return p, acc, l_i, m_new


@triton.jit
def normalize(acc, l_i, m_i):
    """Return the weighted averages and the log-sum-exp in base 2.

    A row without a visible key has l_i = 0. Its average is 0, its log-sum-exp -inf.
    """
    divisor = tl.where(l_i > 0, l_i, 1.0)
    return acc / divisor[:, None], m_i + tl.log2(divisor)
