"""Epilogue: scaling, rounding and storing of finished rows, and clearing of padding."""

import triton
import triton.language as tl

from .fp8 import encode_fp8, load_scale
from .softmax import LN_2


@triton.jit
def scale_values(result, call, kv_head, CACHE_FP8: tl.constexpr):
    """Return rows with the scale of an FP8 cache's values: [BLOCK_M, BLOCK_DV]."""
    if CACHE_FP8:
        v_scale = call.option_tensors.v_scale
        result *= load_scale(v_scale, call.options.scales.v, kv_head, True)
    return result


@triton.jit
def store_rows(output, result, lse, rows, config: tl.constexpr):
    """Store finished rows.

    Args:
        output: Output.
        result: [BLOCK_M, BLOCK_DV].
        lse: [BLOCK_M] log-sum-exp in base 2; it is stored in base e.
        rows: QueryRows.
    """
    dv = tl.arange(0, config.BLOCK_DV)
    if config.OUT_FP8:
        result = result / load_scale(output.scale, output.scale_stride, 0, True)
        result = encode_fp8(result, config.OUT_FP8 == 2)
    token = rows.token_index.to(tl.int64)  # [BLOCK_M]
    head = rows.head.to(tl.int64)  # [BLOCK_M]
    tl.store(
        output.out
        + (token * output.stride_token)[:, None]
        + (head * output.stride_head)[:, None]
        + (dv * output.stride_element)[None, :],
        result.to(output.out.dtype.element_ty),
        mask=rows.is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :],
    )
    if output.lse is not None:
        offset = head * output.lse_stride_head + token * output.lse_stride_token
        lse = (lse * LN_2).to(output.lse.dtype.element_ty)
        tl.store(output.lse + offset, lse, mask=rows.is_row)


@triton.jit
def clear_padding(
    output, first, end, step, kv_head, config: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Store the rows of tokens that belong to no request: 0, and a log-sum-exp of -inf.

    Args:
        first, end, step: every `step`-th token from `first` is cleared.
        BLOCK_H: heads that are cleared at once.
    """
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    dv = tl.arange(0, BLOCK_DV)
    for token in range(first, end, step):
        for first_head in range(0, config.GROUP_SIZE, BLOCK_H):
            in_group = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
            head = (kv_head * config.GROUP_SIZE + in_group).to(tl.int64)
            is_head = in_group < config.GROUP_SIZE
            offset = (
                tl.cast(token, tl.int64) * output.stride_token
                + head * output.stride_head
            )
            zeros = tl.zeros([BLOCK_H, BLOCK_DV], dtype=tl.float32)
            tl.store(
                output.out + offset[:, None] + (dv * output.stride_element)[None, :],
                zeros.to(output.out.dtype.element_ty),
                mask=is_head[:, None] & (dv < config.V_HEAD_DIM)[None, :],
            )
            if output.lse is not None:
                empty = tl.full([BLOCK_H], -float("inf"), dtype=tl.float32)
                tl.store(
                    output.lse
                    + head * output.lse_stride_head
                    + tl.cast(token, tl.int64) * output.lse_stride_token,
                    empty.to(output.lse.dtype.element_ty),
                    mask=is_head,
                )
