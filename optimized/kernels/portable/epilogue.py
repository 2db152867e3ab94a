"""Epilogue: scaling, rounding and storing of finished rows, and clearing of padding."""

import triton
import triton.language as tl

from ..fp8 import encode_fp8, load_scale
from ..softmax import LN_2


@triton.jit
def store_rows(call, result, lse, rows, config: tl.constexpr):
    """Store finished rows.

    Args:
        call: KernelCall.
        result: [BLOCK_M, BLOCK_DV].
        lse: [BLOCK_M] log-sum-exp in base 2; it is stored in base e.
        rows: QueryRows.
    """
    store_columns(call, result, lse, rows, tl.arange(0, config.BLOCK_DV), config)


@triton.jit
def store_columns(call, result, lse, rows, dv, config: tl.constexpr):
    """Store finished rows, computed in the register layout of `dv`.

    Args:
        As in `store_rows`, and dv: [BLOCK_DV] columns.
    """
    out, lse_out, strides = call.tensors.out, call.tensors.lse, call.strides
    if config.OUT_FORMAT != "auto":
        scale = load_scale(
            call.option_tensors.out_scale, call.scale_strides.out, 0, True
        )
        result = result / scale
        result = encode_fp8(result, config.OUT_FORMAT == "fp8_e5m2")
    token = rows.token_index.to(tl.int64)  # [BLOCK_M]
    head = rows.head.to(tl.int64)  # [BLOCK_M]
    tl.store(
        out
        + (token * strides.out_token)[:, None]
        + (head * strides.out_head)[:, None]
        + (dv * strides.out_element)[None, :],
        result.to(out.dtype.element_ty),
        mask=rows.is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :],
    )
    if lse_out is not None:
        offset = head * call.lse_stride_head + token * call.lse_stride_token
        lse = (lse * LN_2).to(lse_out.dtype.element_ty)
        tl.store(lse_out + offset, lse, mask=rows.is_row)


@triton.jit
def clear_padding(
    call, num_tokens, num_reqs, index, num_programs, kv_head, config: tl.constexpr
):
    """Store this program's share of the rows of tokens that belong to no request.

    They get 0, and a log-sum-exp of -inf.

    Args:
        index, num_programs: of the programs of this kv head.
    """
    if config.CLEAR_PADDING:
        first = tl.load(call.tensors.query_start_loc + num_reqs) + index
        clear_tokens(call, first, num_tokens, num_programs, kv_head, config, 16)


@triton.jit
def clear_tokens(
    call, first, end, step, kv_head, config: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Store 0 and a log-sum-exp of -inf in the rows of every `step`-th token from `first`.

    Args:
        BLOCK_H: heads that are cleared at once.
    """
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    out, lse_out, strides = call.tensors.out, call.tensors.lse, call.strides
    dv = tl.arange(0, BLOCK_DV)
    for token in range(first, end, step):
        for first_head in range(0, config.GROUP_SIZE, BLOCK_H):
            in_group = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
            head = (kv_head * config.GROUP_SIZE + in_group).to(tl.int64)
            is_head = in_group < config.GROUP_SIZE
            offset = (
                tl.cast(token, tl.int64) * strides.out_token + head * strides.out_head
            )
            zeros = tl.zeros([BLOCK_H, BLOCK_DV], dtype=tl.float32)
            tl.store(
                out + offset[:, None] + (dv * strides.out_element)[None, :],
                zeros.to(out.dtype.element_ty),
                mask=is_head[:, None] & (dv < config.V_HEAD_DIM)[None, :],
            )
            if lse_out is not None:
                empty = tl.full([BLOCK_H], -float("inf"), dtype=tl.float32)
                tl.store(
                    lse_out
                    + head * call.lse_stride_head
                    + tl.cast(token, tl.int64) * call.lse_stride_token,
                    empty.to(lse_out.dtype.element_ty),
                    mask=is_head,
                )
