"""Epilogue of the Hopper prefill kernel: normalize a warpgroup's rows and store them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.config import LN_2, LOG2_E
from ..common.gluon_names import async_store
from ..common.mma import select_columns
from ..common.softmax import rescale
from ..common.storage import view_box, view_output
from ..common.traits import (
    acc_columns,
    acc_layout,
    count_tokens,
    has_padded_columns,
    has_unused_rows,
)


@gluon.jit
def normalize(acc, m_i, l_i, scale_log2, sink):
    """Return the output rows and their log-sum-exp.

    A row without a visible key has the sum 0. Its output is 0 and its log-sum-exp -inf, or the
    sink.

    Args:
        acc: [WARPGROUP_M, columns] of each part of `acc_columns`.
        m_i: [WARPGROUP_M] running maximum before the scale.
        l_i: [WARPGROUP_M, 4] running sum, one share per thread of a row.
        scale_log2: the scale times log2(e).
        sink: Optional. A score without a value, or one per row. If None, there is none.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, acc_layout(acc[0].shape[1]))
    divisor = gl.convert_layout(gl.sum(l_i, 1), ROWS)  # [WARPGROUP_M]
    if sink is not None:
        m_i = gl.convert_layout(m_i, ROWS) * scale_log2  # [WARPGROUP_M]
        m_new = gl.maximum(m_i, sink * LOG2_E)
        # without a visible key, and with a sink of -inf, both are -inf
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = gl.exp2(m_i - shift)
        divisor = divisor * alpha + gl.exp2(sink * LOG2_E - shift)
        divisor = gl.where(divisor > 0, divisor, 1.0)
        return rescale(acc, alpha / divisor), (m_new + gl.log2(divisor)) * LN_2
    divisor = gl.where(divisor > 0, divisor, 1.0)
    acc = rescale(acc, 1.0 / divisor)
    lse = gl.convert_layout(m_i, ROWS) * scale_log2  # [WARPGROUP_M]
    lse = (lse + gl.log2(divisor)) * LN_2
    return acc, lse


@gluon.jit
def store_tile(
    shared,
    output,
    q_tile,
    acc,
    lse,
    work,
    token,
    head,
    column,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Store a warpgroup's rows: a whole tile by TMA, the end of a request row by row.

    Without a dimension of heads in the tensor map, padded heads are stored row by row, because TMA
    would overwrite the next head. So are outputs of float32, which do not fit the query tile.

    Args:
        shared: `SharedStorage`.
        output: `PrefillArguments`.
        q_tile: index of the query tile, which was read.
        acc: [WARPGROUP_M, columns] of each part of `acc_columns`, normalized rows.
        lse: [WARPGROUP_M].
        work: `WorkItem`.
        token, head: what `find_rows` returns.
        column: [columns] of each part, indices of the columns.
    """
    dtype: gl.constexpr = output.out.dtype.element_ty
    TOKENS: gl.constexpr = count_tokens(config)
    FIRST_TOKEN: gl.constexpr = CONSUMER * TOKENS
    num_queries = work.seq_len * config.ROWS_PER_TOKEN - work.position
    is_row = token < num_queries  # [WARPGROUP_M]
    if has_unused_rows(config):
        is_row = token < gl.minimum(num_queries, FIRST_TOKEN + TOKENS)
    is_whole = (work.num_kv_tiles > 0) & (num_queries >= FIRST_TOKEN + TOKENS)
    query = (work.query_start + token) // config.ROWS_PER_TOKEN  # [WARPGROUP_M]
    PARTS: gl.constexpr = acc_columns(config)
    HAS_HEADS: gl.constexpr = len(output.out_desc.block_type.shape) == 3
    if (has_padded_columns(config) and not HAS_HEADS) or dtype == gl.float32:
        is_whole = False
    if is_whole:
        tile = view_output(shared, q_tile, config)
        for i in gl.static_range(len(acc)):
            if PARTS[i][0] < config.HEAD_DIM:
                part = select_columns(tile, PARTS[i][0], PARTS[i][1])
            else:
                part = select_columns(shared.q_tail.index(q_tile), 0, PARTS[i][1])
            if config.FITS_QUERIES:
                # the tile and its tensor map have the dtype of the fitted queries
                part.store(acc[i].to(dtype).to(part.dtype, bitcast=True))
            else:
                part.store(acc[i].to(part.dtype))
        fence_async_shared()
        COLUMNS: gl.constexpr = output.out_desc.block_type.shape[-1]
        first_row = work.query_start + FIRST_TOKEN
        if HAS_HEADS:
            first_head = work.head * config.GROUP
        else:
            first_row += work.head * output.out_head_rows
            first_head = work.head * output.out_head_columns
        for j in gl.static_range(config.HEAD_DIM // COLUMNS):
            if HAS_HEADS:
                start = [first_row, first_head, j * COLUMNS]
            else:
                start = [first_row, first_head + j * COLUMNS]
            box = view_box(shared.q, output.out_desc, q_tile, j, config)
            async_store(output.out_desc, start, box)
        if config.V_TAIL_DIM > 0:
            if HAS_HEADS:
                start = [first_row, first_head, config.HEAD_DIM]
            else:
                start = [first_row, first_head + config.HEAD_DIM]
            box = view_box(shared.q_tail, output.out_desc, q_tile, 0, config)
            async_store(output.out_desc, start, box)
    else:
        offset = query.to(gl.int64) * output.out_stride_token
        offset += head.to(gl.int64) * output.out_stride_head  # [WARPGROUP_M]
        for i in gl.static_range(len(acc)):
            _store_columns(
                output.out, acc[i].to(dtype), offset, column[i], is_row, config
            )
    if output.lse is not None:
        offset = query.to(gl.int64) * output.lse_stride_token
        offset += head.to(gl.int64) * output.lse_stride_head
        gl.store(output.lse + offset, lse, mask=is_row)


@gluon.jit
def _store_columns(out, acc, offset, column, is_row, config: gl.constexpr):
    """Store the columns of one part of the accumulator, row by row."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    first = gl.expand_dims(gl.convert_layout(offset, ROWS), 1)
    mask = gl.expand_dims(gl.convert_layout(is_row, ROWS), 1)
    is_column = column >= 0
    if has_padded_columns(config):
        is_column = column < config.HEAD_SIZE
    # rows begin at a multiple of 16 bytes
    address = gl.multiple_of(out + first + gl.expand_dims(column, 0), [1, 16])
    gl.store(address, acc, mask=mask & gl.expand_dims(is_column, 0))
