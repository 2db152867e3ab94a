"""Merging of partial attention results by their log-sum-exp.

One program joins a tile of tokens of one head, part after part, with running sums and maxima: no
part is looked at twice. Sums are float32. Every tensor has strides of its own.
"""

import math

import torch
import triton
import triton.language as tl

from ...bookkeeping.attention.merge_states import log2_lse_to_ln as log2_lse_to_ln
from ...contract.shapes import (
    LogSumExp,
    Output,
    PartLogSumExps,
    PartOutputs,
    RankLogSumExp,
)
from ...validation.merge import check_combine, check_merge
from ..kernels.rows import LN_2, LOG2_E
from ..launch.launcher import check_launch, must_widen
from ..launch.operators import operator

TOKENS_PER_PROGRAM = 8


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
    widen = must_widen(output.dtype)
    target = torch.empty_like(output, dtype=torch.float32) if widen else output
    _merge_kernel[(triton.cdiv(tokens, TOKENS_PER_PROGRAM), query_heads)](
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        target,
        output_lse,
        tokens,
        with_prefix,
        *prefix_output.stride(),
        *prefix_lse.stride(),
        *suffix_output.stride(),
        *suffix_lse.stride(),
        *target.stride(),
        *((0, 0) if output_lse is None else output_lse.stride()),
        BASE_E=prefix_lse_base == math.e,
        HEAD_SIZE=head_size,
        HEAD_TILE=triton.next_power_of_2(head_size),
        TOKENS=TOKENS_PER_PROGRAM,
    )
    return output.copy_(target) if widen else output


@operator(like=["outputs", "lses"])
def lse_weighted_combine(
    outputs: PartOutputs,
    lses: PartLogSumExps,
    is_lse_base_on_e: bool = True,
) -> tuple[Output, RankLogSumExp]:
    """Return attention over any number of sets of keys, joined from the results over each."""
    check_combine(outputs, lses)
    check_launch(outputs)
    parts, tokens, query_heads, head_size = outputs.shape
    widen = must_widen(outputs.dtype)
    shape = (tokens, query_heads, head_size)
    output = outputs.new_empty(shape, dtype=torch.float32 if widen else outputs.dtype)
    lse = lses.new_empty(tokens, query_heads)
    if output.numel():
        _combine_kernel[(triton.cdiv(tokens, TOKENS_PER_PROGRAM), query_heads)](
            outputs,
            lses,
            output,
            lse,
            parts,
            tokens,
            *outputs.stride(),
            *lses.stride(),
            *output.stride(),
            *lse.stride(),
            BASE_E=is_lse_base_on_e,
            HEAD_SIZE=head_size,
            HEAD_TILE=triton.next_power_of_2(head_size),
            TOKENS=TOKENS_PER_PROGRAM,
        )
    return output.to(outputs.dtype), lse


@triton.jit(do_not_specialize=["tokens", "with_prefix"])
def _merge_kernel(
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    output,
    output_lse,
    tokens,
    with_prefix,
    prefix_stride_token,
    prefix_stride_head,
    prefix_stride_element,
    prefix_lse_stride_head,
    prefix_lse_stride_token,
    suffix_stride_token,
    suffix_stride_head,
    suffix_stride_element,
    suffix_lse_stride_head,
    suffix_lse_stride_token,
    output_stride_token,
    output_stride_head,
    output_stride_element,
    output_lse_stride_head,
    output_lse_stride_token,
    BASE_E: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, HEAD_TILE)
    is_token = token < tokens
    written = is_token[:, None] & (element < HEAD_SIZE)[None, :]
    # step: count what is not finite as empty
    first = tl.load(
        prefix_lse + head * prefix_lse_stride_head + token * prefix_lse_stride_token,
        mask=is_token & (token < with_prefix),
        other=-float("inf"),
    ).to(tl.float32)
    first = tl.where(first == float("inf"), -float("inf"), first)
    second = tl.load(
        suffix_lse + head * suffix_lse_stride_head + token * suffix_lse_stride_token,
        mask=is_token,
        other=-float("inf"),
    ).to(tl.float32)
    second = tl.where(second == float("inf"), -float("inf"), second)
    total = tl.zeros([TOKENS, HEAD_TILE], dtype=tl.float32)
    row_sum = tl.zeros([TOKENS], dtype=tl.float32)
    row_max = tl.full([TOKENS], -float("inf"), dtype=tl.float32)
    place = (token * prefix_stride_token + head * prefix_stride_head)[:, None]
    value = tl.load(
        prefix_output + place + (element * prefix_stride_element)[None, :],
        mask=written & (first > -float("inf"))[:, None],
        other=0.0,
    ).to(tl.float32)
    total, row_sum, row_max = _fold_part(total, row_sum, row_max, value, first, BASE_E)
    place = (token * suffix_stride_token + head * suffix_stride_head)[:, None]
    value = tl.load(
        suffix_output + place + (element * suffix_stride_element)[None, :],
        mask=written & (second > -float("inf"))[:, None],
        other=0.0,
    ).to(tl.float32)
    total, row_sum, row_max = _fold_part(total, row_sum, row_max, value, second, BASE_E)
    result, joint = _finish(total, row_sum, row_max, BASE_E)
    place = (token * output_stride_token + head * output_stride_head)[:, None]
    tl.store(
        output + place + (element * output_stride_element)[None, :],
        result.to(output.dtype.element_ty),
        mask=written,
    )
    if output_lse is not None:
        tl.store(
            output_lse
            + head * output_lse_stride_head
            + token * output_lse_stride_token,
            joint.to(output_lse.dtype.element_ty),
            mask=is_token,
        )


@triton.jit(do_not_specialize=["parts", "tokens"])
def _combine_kernel(
    outputs,
    lses,
    output,
    lse,
    parts,
    tokens,
    outputs_stride_part,
    outputs_stride_token,
    outputs_stride_head,
    outputs_stride_element,
    lses_stride_part,
    lses_stride_token,
    lses_stride_head,
    output_stride_token,
    output_stride_head,
    output_stride_element,
    lse_stride_token,
    lse_stride_head,
    BASE_E: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, HEAD_TILE)
    is_token = token < tokens
    written = is_token[:, None] & (element < HEAD_SIZE)[None, :]
    total = tl.zeros([TOKENS, HEAD_TILE], dtype=tl.float32)
    row_sum = tl.zeros([TOKENS], dtype=tl.float32)
    row_max = tl.full([TOKENS], -float("inf"), dtype=tl.float32)
    for part in range(parts):
        far = tl.zeros([], dtype=tl.int64) + part
        place = far * lses_stride_part + token * lses_stride_token
        given = tl.load(
            lses + place + head * lses_stride_head, mask=is_token, other=0.0
        ).to(tl.float32)
        # step: count what is not finite as empty
        # inf - inf and nan - nan are no numbers, so only a finite number passes
        given = tl.where(given - given == 0, given, -float("inf"))
        place = far * outputs_stride_part + head * outputs_stride_head
        place = place + (token * outputs_stride_token)[:, None]
        value = tl.load(
            outputs + place + (element * outputs_stride_element)[None, :],
            mask=written & (given > -float("inf"))[:, None],
            other=0.0,
        ).to(tl.float32)
        total, row_sum, row_max = _fold_part(
            total, row_sum, row_max, value, given, BASE_E
        )
    result, joint = _finish(total, row_sum, row_max, BASE_E)
    place = (token * output_stride_token + head * output_stride_head)[:, None]
    tl.store(
        output + place + (element * output_stride_element)[None, :],
        result.to(output.dtype.element_ty),
        mask=written,
    )
    tl.store(
        lse + token * lse_stride_token + head * lse_stride_head,
        joint.to(lse.dtype.element_ty),
        mask=is_token,
    )


@triton.jit
def _fold_part(total, row_sum, row_max, value, part_lse, BASE_E: tl.constexpr):
    """Return the running sums of rows with one more part.

    Log-sum-exps are subtracted before they leave their base. The other way round a chip rounds the
    product in one place and fuses it with the subtraction in another: for log-sum-exps of 90,000
    the same weight would differ by 0.3 % between the values and the sum that divides them.
    """
    # step: weigh each part by its share
    unit: tl.constexpr = LOG2_E if BASE_E else 1.0
    new_max = tl.maximum(row_max, part_lse)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    fade = tl.exp2((row_max - shift) * unit)
    weight = tl.exp2((part_lse - shift) * unit)
    # step: add up what has weight
    total = total * fade[:, None] + value * weight[:, None]
    return total, row_sum * fade + weight, new_max


@triton.jit
def _finish(total, row_sum, row_max, BASE_E: tl.constexpr):
    """Return the averages, and the log-sum-exps in their base; 0 and -inf where nothing is."""
    unit: tl.constexpr = LN_2 if BASE_E else 1.0
    divisor = tl.where(row_sum > 0, row_sum, 1.0)
    return total / divisor[:, None], row_max + tl.log2(divisor) * unit
