"""Merging of partial attention results by their log-sum-exp.

One program merges a tile of tokens of one head, one partial result after another, with a running
maximum, a running sum and an accumulator in float32. Each partial result is read once. Every tensor
has strides of its own.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract.shapes import (
    LogSumExp,
    Output,
    PartLogSumExps,
    PartOutputs,
    RankLogSumExp,
)
from ...reference.attention.merge_states import log2_lse_to_ln as log2_lse_to_ln
from ...validation.merge import check_combine, check_merge
from ..kernels.merge import (
    State,
    add_partial,
    finish,
    load_lse,
    load_output,
    store_state,
    weigh,
)
from ..runtime.launcher import check_launch, must_widen
from ..runtime.operators import operator

TOKENS_PER_PROGRAM = 8


def _state(output: Tensor, lse: Tensor | None) -> State:
    """Return a result whose log-sum-exps are [heads, tokens]."""
    lse_strides = (0, 0) if lse is None else lse.stride()
    return State(output, lse, *output.stride(), *lse_strides)


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
            State(outputs, lses, *outputs.stride()[1:], stride_head, stride_token),  # type: ignore[call-arg]
            outputs.stride(0),
            lses.stride(0),
            num_partials,
            State(output, lse, *output.stride(), lse.stride(1), lse.stride(0)),  # type: ignore[call-arg]
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
    # step: treat infinite log-sum-exps as empty
    prefix_lse = load_lse(prefix, 0, token, head, has_prefix, False)
    suffix_lse = load_lse(suffix, 0, token, head, is_token, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    value = load_output(prefix, 0, prefix_lse, token, head, element, is_token, HEAD_DIM)
    # step: compute the weight of each partial result
    alpha, weight, m_i = weigh(m_i, prefix_lse, BASE_E)
    # step: add the partial results that have weight
    acc, l_i = add_partial(acc, l_i, value, alpha, weight)
    value = load_output(suffix, 0, suffix_lse, token, head, element, is_token, HEAD_DIM)
    # step: compute the weight of each partial result
    alpha, weight, m_i = weigh(m_i, suffix_lse, BASE_E)
    # step: add the partial results that have weight
    acc, l_i = add_partial(acc, l_i, value, alpha, weight)
    result, lse = finish(acc, l_i, m_i, BASE_E)
    store_state(merged, result, lse, token, head, element, is_token, HEAD_DIM)


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
        # step: treat log-sum-exps that are not finite as empty
        lse = load_lse(partials, begin, token, head, is_token, True)
        begin = index * stride_partial
        value = load_output(
            partials, begin, lse, token, head, element, is_token, HEAD_DIM
        )
        # step: compute the weight of each partial result
        alpha, weight, m_i = weigh(m_i, lse, BASE_E)
        # step: add the partial results that have weight
        acc, l_i = add_partial(acc, l_i, value, alpha, weight)
    result, lse = finish(acc, l_i, m_i, BASE_E)
    store_state(merged, result, lse, token, head, element, is_token, HEAD_DIM)
