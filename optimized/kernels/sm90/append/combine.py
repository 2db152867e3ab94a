"""Combination of the partial results of a query tile that spans several segments.

The warpgroup that arrives last combines its rows of all segments. Its registers hold a few rows of
several partial results, so that their loads are in flight at the same time: loaded one after the
other, 16 partial results took about 19 us of the 113 of one request over 65,536 keys (H200).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import WARP_SIZE, WARPGROUP_M
from ..invariant.fold import normalize_state
from ..invariant.rows import store_lse, store_rows
from .rows import locate_partials

ROWS_AT_ONCE = gl.constexpr(16)
"""Rows that are combined at once."""
NUMBERS_AT_ONCE = gl.constexpr(32)
"""Registers per thread of the partial results that are loaded together: 2 of head size 128.

With 4 of them and two warpgroups, triton 3.6 spills in the loop without masks: one register is
stored and loaded per KV tile, seven with a window of 1,024. On an H200 8 requests of 32 tokens over
8,192 keys then take 99.2 us instead of 95.4, 16 of 16 over 16,384 keys 261.1 instead of 259.7.
"""


@gluon.constexpr_function
def count_partials(head_dim, num_warps):
    """Return how many partial results are loaded together, a power of two."""
    per_partial = ROWS_AT_ONCE.value * head_dim // (num_warps * WARP_SIZE.value)
    return NUMBERS_AT_ONCE.value // per_partial


@gluon.constexpr_function
def partials_layout(head_dim, num_warps):
    """Return the register layout of [partial results, rows, HEAD_DIM].

    A thread has the same elements of all partial results, four columns at a time.
    """
    partials = count_partials(head_dim, num_warps)
    columns = min(WARP_SIZE.value, head_dim // 4)
    rows = WARP_SIZE.value // columns
    return gl.BlockedLayout(
        [partials, 1, 4], [1, rows, columns], [1, num_warps, 1], [2, 1, 0]
    )


@gluon.jit
def find_row(row, work, output, config: gl.constexpr):
    """Return token and query head of rows of a query tile, and which of them exist.

    Args:
        row: [rows] of the query tile.
        work: its `WorkItem`.
        output: `AppendArguments`.
    """
    query = row // config.GROUP
    of_group = row % config.GROUP
    is_row = (query < work.seq_len - work.position) & (of_group < output.group_size)
    head = gl.program_id(0) * output.group_size + of_group
    return work.query_start + query, head, is_row


@gluon.jit
def finish_rows(output, acc, m_i, l_i, row, work, scale, score, config: gl.constexpr):
    """Normalize and store rows that have attended to all keys.

    Args:
        acc, m_i, l_i: [rows, HEAD_DIM], [rows], [rows].
        row: [rows] of the query tile.
        scale: of the maxima, times log2(e).
        score: `ScoreArgs`.
    """
    token, head, is_row = find_row(row, work, output, config)
    sink = None
    if score.sinks is not None:
        sink = gl.load(score.sinks + head, mask=is_row, other=0.0)
    result, lse = normalize_state(acc, m_i, l_i, scale, sink)
    store_rows(output, result, token, head, is_row, config)
    store_lse(output, lse, token, head, is_row)


@gluon.jit
def combine_rows(
    output, first, last, work, score,
    config: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Combine and store a warpgroup's rows of a query tile.

    The result does not depend on which program combines them.

    Args:
        first, last: segments of the query tile, at least two.
        work: its `WorkItem`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    COUNT: gl.constexpr = count_partials(HEAD_DIM, gl.num_warps())
    LAYOUT: gl.constexpr = partials_layout(HEAD_DIM, gl.num_warps())
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ROWS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    ACC: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    begin_row = CONSUMER * WARPGROUP_M
    num_rows = (work.seq_len - work.position) * config.GROUP
    num_rows = gl.minimum(num_rows - begin_row, WARPGROUP_M)
    for in_warpgroup in range(0, num_rows, ROWS_AT_ONCE):
        row = begin_row + in_warpgroup + gl.arange(0, ROWS_AT_ONCE, ROWS)
        _, _, is_row = find_row(row, work, output, config)
        is_kept = is_row & (row < output.partial_rows)
        acc = gl.zeros([ROWS_AT_ONCE, HEAD_DIM], gl.float32, ACC)
        m_i = gl.full([ROWS_AT_ONCE], -float("inf"), gl.float32, ROWS)
        l_i = gl.full([ROWS_AT_ONCE], 0.0, gl.float32, ROWS)
        for begin in range(first, last + 1, COUNT):
            segment = begin + gl.arange(0, COUNT, gl.SliceLayout(1, PAIRS))
            is_partial = gl.expand_dims(segment <= last, 1) & gl.expand_dims(is_kept, 0)
            outs, lses = locate_partials(output, first, segment, row, LAYOUT, config)
            lse = gl.load(
                lses, mask=is_partial, other=-float("inf"), cache_modifier=".cg"
            )  # [COUNT, ROWS_AT_ONCE]
            out = gl.load(
                outs,
                mask=gl.expand_dims(is_partial, 2),
                other=0.0,
                cache_modifier=".cg",
            )  # [COUNT, ROWS_AT_ONCE, HEAD_DIM]
            m_new = gl.maximum(m_i, gl.max(lse, 0))
            # a row without a visible key has the log-sum-exp -inf, and -inf - -inf = NaN
            shift = gl.where(m_new == -float("inf"), 0.0, m_new)
            alpha = gl.exp2(m_i - shift)
            beta = gl.exp2(lse - gl.expand_dims(shift, 0))
            l_i = l_i * alpha + gl.sum(beta, 0)
            alpha = gl.expand_dims(gl.convert_layout(alpha, ACC_ROWS), 1)
            acc = acc * alpha + gl.sum(out * gl.expand_dims(beta, 2), 0)
            m_i = m_new
        finish_rows(
            output, acc, gl.convert_layout(m_i, ACC_ROWS),
            gl.convert_layout(l_i, ACC_ROWS), gl.convert_layout(row, ACC_ROWS), work,
            1.0, score, config,
        )  # fmt: skip
