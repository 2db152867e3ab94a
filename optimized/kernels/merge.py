"""Steps of merging partial results: load one, add it by its log-sum-exp, store the result."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .softmax import LN_2, LOG2_E


class State(NamedTuple):
    """A result of attention, with strides in elements.

    Args:
        output: [tokens, heads, head_size].
        lse: log-sum-exp per token and head. Optional. If None, it is not written.
    """

    output: Any
    lse: Any
    stride_token: Any
    stride_head: Any
    stride_element: Any
    lse_stride_head: Any
    lse_stride_token: Any


@triton.jit
def load_lse(state, begin, token, head, has_state, NAN_IS_EMPTY: tl.constexpr):
    """Return log-sum-exps [BLOCK_M], -inf for empty results."""
    offsets = begin + head * state.lse_stride_head + token * state.lse_stride_token
    lse = tl.load(state.lse + offsets, mask=has_state, other=-float("inf"))
    lse = lse.to(tl.float32)
    if NAN_IS_EMPTY:
        # inf - inf and NaN - NaN are NaN, so only finite numbers stay
        lse = tl.where(lse - lse == 0, lse, -float("inf"))
    else:
        lse = tl.where(lse == float("inf"), -float("inf"), lse)
    return lse


@triton.jit
def load_output(
    state, begin, lse, token, head, element, is_token, HEAD_DIM: tl.constexpr
):
    """Return outputs [BLOCK_M, BLOCK_D]. Those of empty results may be NaN and are not read."""
    offsets = begin + token * state.stride_token + head * state.stride_head
    has_weight = is_token & (lse > -float("inf"))
    return tl.load(
        state.output + offsets[:, None] + (element * state.stride_element)[None, :],
        mask=has_weight[:, None] & (element < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def store_state(
    state, result, lse, token, head, element, is_token, HEAD_DIM: tl.constexpr
):
    """Store outputs [BLOCK_M, BLOCK_D], and log-sum-exps [BLOCK_M] unless they are None."""
    offsets = token * state.stride_token + head * state.stride_head
    tl.store(
        state.output + offsets[:, None] + (element * state.stride_element)[None, :],
        result.to(state.output.dtype.element_ty),
        mask=is_token[:, None] & (element < HEAD_DIM)[None, :],
    )
    if state.lse is not None:
        offsets = head * state.lse_stride_head + token * state.lse_stride_token
        lse = lse.to(state.lse.dtype.element_ty)
        tl.store(state.lse + offsets, lse, mask=is_token)


@triton.jit
def weigh(m_i, lse, BASE_E: tl.constexpr):
    """Return the factor of the sums so far, the weight of one more partial result, the new maximum.

    Log-sum-exps are subtracted before they are converted to base 2. In the other order the compiler
    rounds the product in one place and fuses it with the subtraction in another. For log-sum-exps
    of 90,000 the same weight would then differ by 0.3 % between the values and their divisor.
    """
    unit: tl.constexpr = LOG2_E if BASE_E else 1.0
    m_new = tl.maximum(m_i, lse)
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    return tl.exp2((m_i - shift) * unit), tl.exp2((lse - shift) * unit), m_new


@triton.jit
def add_partial(acc, l_i, value, alpha, weight):
    """Return accumulator and sum with one more partial result.

    Each sum fuses one product, named here, so the bits are the same wherever this is compiled.
    """
    acc = tl.fma(
        acc, tl.broadcast_to(alpha[:, None], acc.shape), value * weight[:, None]
    )
    return acc, tl.fma(l_i, alpha, weight)


@triton.jit
def finish(acc, l_i, m_i, BASE_E: tl.constexpr):
    """Return outputs and log-sum-exps in their base; 0 and -inf if all results are empty."""
    unit: tl.constexpr = LN_2 if BASE_E else 1.0
    # a NaN stays
    divisor = tl.where(l_i == 0, 1.0, l_i)
    return acc / divisor[:, None], tl.fma(
        tl.log2(divisor), tl.full(divisor.shape, unit, tl.float32), m_i
    )
