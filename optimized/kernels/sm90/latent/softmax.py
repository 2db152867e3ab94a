"""Online softmax of the Hopper latent decode kernel, and p for the other warpgroup."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .config import BLOCK_M, BLOCK_N, p_operand_layout, qk_layout
from .sync import p_empty_wait, p_full_arrive


@gluon.jit
def mask_qk(qk, kv_tile, visible_end):
    """Set the dot products with keys that are not visible to -inf."""
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, qk_layout()))  # [BLOCK_N]
    # relative to the tile, because then the columns are constants
    end = visible_end - kv_tile * BLOCK_N  # [BLOCK_M]
    return gl.where(column[None, :] < end[:, None], qk, -float("inf"))


@gluon.jit
def _reduce_columns(qk, TAKE_MAX: gl.constexpr):
    """Return each thread's maximum or sum of its own columns.  # [BLOCK_M, 4]"""
    # columns are [eight columns, thread, neighbour]
    qk = gl.reshape(qk, [BLOCK_M, 2, BLOCK_N // 16, 4, 2])
    if TAKE_MAX:
        return gl.max(gl.max(gl.max(qk, 4), 2), 1)
    return gl.sum(gl.sum(gl.sum(qk, 4), 2), 1)


@gluon.jit
def online_softmax(qk, m_i, l_i, scale_log2, FIRST: gl.constexpr):
    """Return p, alpha, and the new m_i and l_i. A row may have no visible key so far.

    Args:
        qk: [BLOCK_M, BLOCK_N] dot products before the scale.
        m_i, l_i: see `LatentCarry`.
        scale_log2: the scale times log2(e).
        FIRST: whether this is the first KV tile of the rows; then `l_i` is not read.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout())
    m_new = gl.max(_reduce_columns(qk, True), 1)  # [BLOCK_M]
    m_new = gl.convert_layout(m_new, ROWS, assert_trivial=True)
    m_new = gl.maximum(m_i, m_new)
    # a row without a visible key so far has the maximum -inf, and -inf - -inf = NaN
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2((m_i - shift) * scale_log2)  # [BLOCK_M]
    p = gl.exp2(qk * scale_log2 - (shift * scale_log2)[:, None])
    l_new = _reduce_columns(p, False)  # [BLOCK_M, 4]
    if not FIRST:
        SUM_ROWS: gl.constexpr = gl.SliceLayout(1, l_new.type.layout)
        alpha_of_sum = gl.convert_layout(alpha, SUM_ROWS, assert_trivial=True)
        l_new = l_i * gl.expand_dims(alpha_of_sum, 1) + l_new
    return p, alpha, m_new, l_new


@gluon.jit
def publish_p(shared, p, alpha):
    """Write p and alpha to shared memory for warpgroup 1, and return p as the left operand."""
    p = p.to(shared.p.dtype)
    p_empty_wait()
    shared.p.store(p)
    shared.alpha.store(alpha)
    # ordinary stores, before the tensor cores read through the async proxy
    fence_async_shared()
    p_full_arrive()
    return gl.convert_layout(p, p_operand_layout())


@gluon.jit
def finish_softmax(carry, scale_log2):
    """Return 1 / sum and the log-sum-exp in base 2.  # [BLOCK_M] each

    A row without a visible key has the sum 0. Its output is 0 and its log-sum-exp -inf.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout())
    total = gl.convert_layout(gl.sum(carry.l_i, 1), ROWS)
    total = gl.where(total > 0, total, 1.0)
    return 1.0 / total, carry.m_i * scale_log2 + gl.log2(total)
