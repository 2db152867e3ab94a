"""Merging of partial attention results by their log-sum-exp.

One program merges a tile of tokens of one head, one partial result after another, with a running
maximum, a running sum and an accumulator in float32. Each partial result is read once. Every tensor
has strides of its own.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...bookkeeping.attention.merge_states import log2_lse_to_ln as log2_lse_to_ln
from ...contract.shapes import (
    LogSumExp,
    Output,
    PartLogSumExps,
    PartOutputs,
    RankLogSumExp,
)
from ...validation.merge import check_combine, check_merge
from ..kernels.softmax import LN_2, LOG2_E
from ..launch.launcher import check_launch, must_widen
from ..launch.operators import operator

TOKENS_PER_PROGRAM = 8


class _State(NamedTuple):
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


def _state(output: Tensor, lse: Tensor | None) -> _State:
    """Return a result whose log-sum-exps are [heads, tokens]."""
    lse_strides = (0, 0) if lse is None else lse.stride()
    return _State(output, lse, *output.stride(), *lse_strides)


@operator(out=["output", "output_lse"])
def merge_attn_states(
    prefix_output: Output,
    prefix_lse: LogSumExp,
    suffix_output: Output,
    suffix_lse: LogSumExp,
    prefill_tokens_with_context: int | None = None,
    output: Output | None = None,
    output_lse: LogSumExp | None = None,
    prefix_lse_base: float = math.e,
    suffix_lse_base: float = math.e,
) -> Output:
    """Return attention over two sets of keys, joined from the results over each."""
    check_merge(
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        prefill_tokens_with_context,
        output,
        output_lse,
        prefix_lse_base,
        suffix_lse_base,
    )
    check_launch(prefix_output)
    output = prefix_output.new_empty(prefix_output.shape) if output is None else output
    tokens, query_heads, head_size = prefix_output.shape
    if not output.numel():
        return output
    with_prefix = tokens
    if prefill_tokens_with_context is not None:
        with_prefix = prefill_tokens_with_context
    upcast = must_widen(output.dtype)
    target = torch.empty_like(output, dtype=torch.float32) if upcast else output
    _merge_kernel[(triton.cdiv(tokens, TOKENS_PER_PROGRAM), query_heads)](
        _state(prefix_output, prefix_lse),
        _state(suffix_output, suffix_lse),
        _state(target, output_lse),
        tokens,
        with_prefix,
        BASE_E=prefix_lse_base == math.e,
        HEAD_DIM=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_M=TOKENS_PER_PROGRAM,
    )
    return output.copy_(target) if upcast else output


@operator(like=["outputs", "lses"])
def lse_weighted_combine(
    outputs: PartOutputs,
    lses: PartLogSumExps,
    is_lse_base_on_e: bool = True,
) -> tuple[Output, RankLogSumExp]:
    """Return attention over any number of sets of keys, joined from the results over each."""
    check_combine(outputs, lses)
    check_launch(outputs)
    num_partials, tokens, query_heads, head_size = outputs.shape
    upcast = must_widen(outputs.dtype)
    shape = (tokens, query_heads, head_size)
    output = outputs.new_empty(shape, dtype=torch.float32 if upcast else outputs.dtype)
    lse = lses.new_empty(tokens, query_heads)
    if output.numel():
        _, stride_token, stride_head = lses.stride()
        _combine_kernel[(triton.cdiv(tokens, TOKENS_PER_PROGRAM), query_heads)](
            _State(outputs, lses, *outputs.stride()[1:], stride_head, stride_token),  # type: ignore[call-arg]
            outputs.stride(0),
            lses.stride(0),
            num_partials,
            _State(output, lse, *output.stride(), lse.stride(1), lse.stride(0)),  # type: ignore[call-arg]
            tokens,
            BASE_E=is_lse_base_on_e,
            HEAD_DIM=head_size,
            BLOCK_D=triton.next_power_of_2(head_size),
            BLOCK_M=TOKENS_PER_PROGRAM,
        )
    return output.to(outputs.dtype), lse


@triton.jit(do_not_specialize=["tokens", "with_prefix"])
def _merge_kernel(
    prefix,
    suffix,
    merged,
    tokens,
    with_prefix,
    BASE_E: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge two results. Only the first `with_prefix` tokens have one of the prefix."""
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, BLOCK_D)
    is_token = token < tokens
    has_prefix = is_token & (token < with_prefix)
    prefix_lse = _load_lse(prefix, 0, token, head, has_prefix, False)
    suffix_lse = _load_lse(suffix, 0, token, head, is_token, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    value = _load_output(
        prefix, 0, prefix_lse, token, head, element, is_token, HEAD_DIM
    )
    acc, l_i, m_i = _add_partial(acc, l_i, m_i, value, prefix_lse, BASE_E)
    value = _load_output(
        suffix, 0, suffix_lse, token, head, element, is_token, HEAD_DIM
    )
    acc, l_i, m_i = _add_partial(acc, l_i, m_i, value, suffix_lse, BASE_E)
    result, lse = _finish(acc, l_i, m_i, BASE_E)
    _store_state(merged, result, lse, token, head, element, is_token, HEAD_DIM)


@triton.jit(do_not_specialize=["num_partials", "tokens"])
def _combine_kernel(
    partials,
    stride_partial,
    lse_stride_partial,
    num_partials,
    merged,
    tokens,
    BASE_E: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge any number of results. `partials` is the first of them."""
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, BLOCK_D)
    is_token = token < tokens
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    for partial in range(num_partials):
        index = tl.zeros([], dtype=tl.int64) + partial
        begin = index * lse_stride_partial
        lse = _load_lse(partials, begin, token, head, is_token, True)
        begin = index * stride_partial
        value = _load_output(
            partials, begin, lse, token, head, element, is_token, HEAD_DIM
        )
        acc, l_i, m_i = _add_partial(acc, l_i, m_i, value, lse, BASE_E)
    result, lse = _finish(acc, l_i, m_i, BASE_E)
    _store_state(merged, result, lse, token, head, element, is_token, HEAD_DIM)


@triton.jit
def _load_lse(state, begin, token, head, has_state, NAN_IS_EMPTY: tl.constexpr):
    """Return log-sum-exps [BLOCK_M], -inf for empty results."""
    offsets = begin + head * state.lse_stride_head + token * state.lse_stride_token
    lse = tl.load(state.lse + offsets, mask=has_state, other=-float("inf"))
    lse = lse.to(tl.float32)
    # step: treat log-sum-exps that are not finite as empty
    if NAN_IS_EMPTY:
        # inf - inf and NaN - NaN are NaN, so only finite numbers stay
        lse = tl.where(lse - lse == 0, lse, -float("inf"))
    else:
        lse = tl.where(lse == float("inf"), -float("inf"), lse)
    return lse


@triton.jit
def _load_output(
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
def _store_state(
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
def _add_partial(acc, l_i, m_i, value, lse, BASE_E: tl.constexpr):
    """Return accumulator, sum and maximum with one more partial result.

    Log-sum-exps are subtracted before they are converted to base 2. In the other order the compiler
    rounds the product in one place and fuses it with the subtraction in another. For log-sum-exps
    of 90,000 the same weight would then differ by 0.3 % between the values and their divisor.
    """
    # step: compute the weight of each partial result
    unit: tl.constexpr = LOG2_E if BASE_E else 1.0
    m_new = tl.maximum(m_i, lse)
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - shift) * unit)
    weight = tl.exp2((lse - shift) * unit)
    # step: add the partial results that have weight
    # each sum fuses one product, named here, so the bits are the same wherever this is compiled
    acc = tl.fma(
        acc, tl.broadcast_to(alpha[:, None], acc.shape), value * weight[:, None]
    )
    return acc, tl.fma(l_i, alpha, weight), m_new


@triton.jit
def _finish(acc, l_i, m_i, BASE_E: tl.constexpr):
    """Return outputs and log-sum-exps in their base; 0 and -inf if all results are empty."""
    unit: tl.constexpr = LN_2 if BASE_E else 1.0
    divisor = tl.where(l_i > 0, l_i, 1.0)
    return acc / divisor[:, None], tl.fma(
        tl.log2(divisor), tl.full(divisor.shape, unit, tl.float32), m_i
    )
