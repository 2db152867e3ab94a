"""Fold of the splits of batch-invariant rows, and their normalization.

A split's state is its accumulator, running maximum and running sum, not normalized. Two kernels
fold states in the same order, so every product that a sum fuses is named: a compiler may not choose
another one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import LN_2, LOG2_E


@gluon.jit
def fold(acc, m_i, l_i, split_acc, split_m, split_l, scale_log2):
    """Return acc, m_i and l_i of rows with the state of one more split.

    A state without a visible key leaves the other one as it is.

    Args:
        acc, split_acc: [rows, HEAD_DIM].
        m_i, l_i, split_m, split_l: [rows] maximum before the scale, and sum.
        scale_log2: the scale times log2(e).
    """
    m_new = gl.maximum(m_i, split_m)  # [rows]
    # the maximum of two states without a key is -inf, and -inf - -inf = NaN
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2((m_i - shift) * scale_log2)
    beta = gl.exp2((split_m - shift) * scale_log2)
    was_empty = m_i == -float("inf")
    is_empty = split_m == -float("inf")
    l_new = gl.fma(l_i, alpha, split_l * beta)
    l_new = gl.where(is_empty, l_i, gl.where(was_empty, split_l, l_new))
    alpha = gl.broadcast(gl.expand_dims(alpha, 1), acc)[0]
    acc_new = gl.fma(acc, alpha, split_acc * gl.expand_dims(beta, 1))
    acc_new = gl.where(gl.expand_dims(was_empty, 1), split_acc, acc_new)
    return gl.where(gl.expand_dims(is_empty, 1), acc, acc_new), m_new, l_new


@gluon.jit
def normalize_state(acc, m_i, l_i, scale_log2, sink):
    """Return output rows and their log-sum-exp.

    A row without a visible key has the sum 0. Its output is 0 and its log-sum-exp -inf, or the
    sink.

    Args:
        acc: [rows, HEAD_DIM].
        m_i, l_i: [rows] maximum before the scale, and sum.
        scale_log2: the scale times log2(e).
        sink: Optional. [rows] scores without a value. If None, there are none.
    """
    # a product of its own: as a plain product it might be fused into a difference
    zeros = gl.full(m_i.shape, -0.0, gl.float32, m_i.type.layout)
    scales = gl.full(m_i.shape, scale_log2, gl.float32, m_i.type.layout)
    m_i = gl.fma(m_i, scales, zeros)
    if sink is not None:
        sink = gl.fma(
            sink, gl.full(sink.shape, LOG2_E, gl.float32, sink.type.layout), zeros
        )
        m_new = gl.maximum(m_i, sink)
        # without a visible key, and with a sink of -inf, both are -inf
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = gl.exp2(m_i - shift)
        l_i = gl.fma(l_i, alpha, gl.exp2(sink - shift))
        divisor = gl.where(l_i > 0, l_i, 1.0)
        return acc * gl.expand_dims(alpha / divisor, 1), (
            m_new + gl.log2(divisor)
        ) * LN_2
    divisor = gl.where(l_i > 0, l_i, 1.0)
    return acc * gl.expand_dims(1.0 / divisor, 1), (m_i + gl.log2(divisor)) * LN_2
