"""Combination of the partial results of the Hopper append kernel, in a launch of its own.

A query tile that spans several segments has a partial result in each: the normalized rows and their
log-sum-exp. The partials are combined in the order of their keys.
"""

import triton
import triton.language as tl

from ...combine import fold_partials
from ...options.sinks import start_with_sinks
from ...softmax import LN_2, LOG2_E, normalize, start_softmax

ROWS = tl.constexpr(4)
"""Rows per program."""
SPLITS = tl.constexpr(4)
"""Partial results that are loaded at once."""
SPAN_FIELDS = tl.constexpr(4)
"""`rows.SPAN_FIELDS`."""

NUMBERS = [
    "num_reqs",
    "num_tokens",
    "partial_rows",
    "group_size",
    "out_stride_token",
    "out_stride_head",
    "lse_stride_head",
    "lse_stride_token",
]


@triton.jit
def _store_rows(
    out, lse, result, row_lse, token, head, is_row,
    out_stride_token, out_stride_head, lse_stride_head, lse_stride_token,
    config: tl.constexpr,
):  # fmt: skip
    """Store rows of the output and, unless it is None, of the log-sum-exp.

    Args:
        result: [ROWS, HEAD_DIM]; row_lse: [ROWS].
        token, head, is_row: [ROWS].
    """
    HEAD_DIM: tl.constexpr = config.HEAD_DIM
    column = tl.arange(0, HEAD_DIM)
    token = token.to(tl.int64)
    offset = token * out_stride_token + head.to(tl.int64) * out_stride_head
    tl.store(
        out + offset[:, None] + column[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (column < config.HEAD_SIZE)[None, :],
    )
    if lse is not None:
        offset = token * lse_stride_token + head.to(tl.int64) * lse_stride_head
        tl.store(lse + offset, row_lse, mask=is_row)


@triton.jit
def _combine_rows(
    partial_out, partial_lse, sinks, head, row, is_row, first, last, partial_rows,
    config: tl.constexpr,
):  # fmt: skip
    """Return the combined rows and their log-sum-exp.  # [ROWS, HEAD_DIM], [ROWS]

    Args:
        head, row, is_row: [ROWS] query heads, and rows of the query tile.
        first, last: the query tile's segments.
    """
    HEAD_DIM: tl.constexpr = config.HEAD_DIM
    column = tl.arange(0, HEAD_DIM)
    acc, l_i, m_i = start_softmax(ROWS, HEAD_DIM)
    l_i, m_i = start_with_sinks(l_i, m_i, sinks, head, is_row, True)
    for begin in range(first, last + 1, SPLITS):
        segment = begin + tl.arange(0, SPLITS)  # [SPLITS]
        is_partial = (segment <= last)[:, None] & is_row[None, :]  # [SPLITS, ROWS]
        slot = segment * 2 + (segment == first).to(tl.int32)
        slot = slot * tl.num_programs(0) + tl.program_id(0)
        offset = slot.to(tl.int64)[:, None] * partial_rows + row[None, :]
        lse = tl.load(partial_lse + offset, mask=is_partial, other=-float("inf"))
        # [SPLITS, ROWS, HEAD_DIM]
        results = tl.load(
            partial_out + offset[:, :, None] * HEAD_DIM + column[None, None, :],
            mask=is_partial[:, :, None],
            other=0.0,
        )
        acc, l_i, m_i = fold_partials(acc, l_i, m_i, results, lse * LOG2_E)
    result, row_lse = normalize(acc, l_i, m_i)
    return result, row_lse * LN_2


@triton.jit(do_not_specialize=NUMBERS)
def append_combine_kernel(
    out,
    lse,
    partial_out,
    partial_lse,
    spans,
    query_start_loc,
    sinks,
    num_reqs,
    num_tokens,
    partial_rows,
    group_size,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    config: tl.constexpr,
):
    """Store the rows of split query tiles, and clear the rows of no request.

    Grid: (KV heads, segments, groups of ROWS rows).

    Args:
        out: [tokens, heads, HEAD_SIZE]; lse: [heads, tokens], or None.
        partial_out, partial_lse, spans, partial_rows, group_size: see `rows.OutputArgs`.
        num_tokens: tokens of the output.
    """
    HEAD_DIM: tl.constexpr = config.HEAD_DIM
    kv_head, segment, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = spans + (segment * tl.num_programs(0) + kv_head) * SPAN_FIELDS
    first_token = tl.load(span)
    num_rows = tl.load(span + 1) * config.GROUP
    last = tl.load(span + 2)
    live_tokens = tl.load(query_start_loc + num_reqs).to(tl.int32)
    if group * ROWS < num_rows:
        row = group * ROWS + tl.arange(0, ROWS)
        of_group = row % config.GROUP
        is_row = (row < num_rows) & (row < partial_rows) & (of_group < group_size)
        head = kv_head * group_size + of_group
        result, row_lse = _combine_rows(
            partial_out, partial_lse, sinks, head, row, is_row, segment, last,
            partial_rows, config,
        )  # fmt: skip
        _store_rows(
            out, lse, result, row_lse, first_token + row // config.GROUP, head, is_row,
            out_stride_token, out_stride_head, lse_stride_head, lse_stride_token, config,
        )  # fmt: skip
    # the rows of padding are divided among the programs of a KV head
    index = segment * tl.num_programs(2) + group
    padding = (num_tokens - live_tokens) * group_size
    step = tl.num_programs(1) * tl.num_programs(2) * ROWS
    zeros, _, empty = start_softmax(ROWS, HEAD_DIM)
    for begin in range(index * ROWS, padding, step):
        row = begin + tl.arange(0, ROWS)
        head = kv_head * group_size + row % group_size
        _store_rows(
            out, lse, zeros, empty, live_tokens + row // group_size, head, row < padding,
            out_stride_token, out_stride_head, lse_stride_head, lse_stride_token, config,
        )  # fmt: skip
