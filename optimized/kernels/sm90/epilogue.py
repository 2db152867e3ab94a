"""Epilogue of the Hopper prefill kernel: normalize a warpgroup's rows and store them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .config import LN_2, WARPGROUP_M, acc_layout


class OutputArgs(NamedTuple):
    """The output and its log-sum-exp, as the kernel's arguments describe them.

    Args:
        tma: `TmaTensor` of the output.
        out: [tokens, heads, HEAD_DIM].
        lse: [heads, tokens], or None.
        out_stride_token, out_stride_head, lse_stride_token, lse_stride_head: in elements.
    """

    tma: Any
    out: Any
    lse: Any
    out_stride_token: Any
    out_stride_head: Any
    lse_stride_token: Any
    lse_stride_head: Any


@gluon.jit
def normalize(acc, m_i, l_i, scale_log2, HEAD_DIM: gl.constexpr):
    """Return the output rows and their log-sum-exp.

    A row without a visible key has the sum 0. Its output is 0 and its log-sum-exp -inf.

    Args:
        acc: [WARPGROUP_M, HEAD_DIM].
        m_i: [WARPGROUP_M] running maximum before the scale.
        l_i: [WARPGROUP_M, 4] running sum, one share per thread of a row.
        scale_log2: the scale times log2(e).
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, acc_layout(HEAD_DIM))
    divisor = gl.convert_layout(gl.sum(l_i, 1), ROWS)  # [WARPGROUP_M]
    divisor = gl.where(divisor > 0, divisor, 1.0)
    acc = acc * (1.0 / divisor)[:, None]
    lse = gl.convert_layout(m_i, ROWS) * scale_log2  # [WARPGROUP_M]
    lse = (lse + gl.log2(divisor)) * LN_2
    return acc, lse


@gluon.jit
def store_tile(
    output,
    staging,
    acc,
    lse,
    work,
    row,
    column,
    HEAD_DIM: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Store a warpgroup's rows: a whole tile by TMA, the end of a request row by row.

    Args:
        output: `OutputArgs`.
        staging: [WARPGROUP_M, HEAD_DIM] shared memory of the query tile, which was read.
        acc: [WARPGROUP_M, HEAD_DIM] normalized rows.
        lse: [WARPGROUP_M].
        work: `WorkItem`.
        row: [WARPGROUP_M] indices of the rows in the work item.
        column: [HEAD_DIM] indices of the columns.
    """
    dtype: gl.constexpr = staging.dtype
    FIRST_ROW: gl.constexpr = CONSUMER * WARPGROUP_M
    is_row = row < work.num_queries  # [WARPGROUP_M]
    if (work.num_kv_tiles > 0) & (work.num_queries >= FIRST_ROW + WARPGROUP_M):
        staging.store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            output.tma.desc,
            [
                work.query_start + FIRST_ROW + work.head * output.tma.head_rows,
                work.head * output.tma.head_columns,
            ],
            staging,
        )
    else:
        offset = (work.query_start + row).to(gl.int64) * output.out_stride_token
        offset += work.head.to(gl.int64) * output.out_stride_head  # [WARPGROUP_M]
        gl.store(
            output.out + offset[:, None] + column[None, :],
            acc.to(dtype),
            mask=is_row[:, None] & (column >= 0)[None, :],
        )
    if output.lse is not None:
        offset = (work.query_start + row).to(gl.int64) * output.lse_stride_token
        offset += work.head.to(gl.int64) * output.lse_stride_head
        gl.store(output.lse + offset, lse, mask=is_row)
