"""Rows of query tiles of the Hopper append kernel, and where their partial results are stored.

A query tile has the rows of several tokens and of the query heads that share a KV head. Row r is
query head r % GROUP of token r // GROUP. If the heads are not a power of two, some rows are unused.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class OutputArgs(NamedTuple):
    """Results and partial results, as the kernel's arguments describe them.

    Args:
        out: [tokens, heads, HEAD_SIZE], in the dtype of the queries or float32.
        lse: [heads, tokens], or None.
        partials: [segments, 2, KV heads, partial_rows, HEAD_DIM] accumulators of a segment: of the
            query tile that began in an earlier segment, and of the one that begins here. After
            them as many rows of maxima, and of sums.
        semaphores: [segments, KV heads, consumers] int32 arrivals of a warpgroup's partial results
            of the query tile that begins in a segment; 0 before and after the launch.
        partial_rows: rows of a query tile, at most, for which there is memory.
        query_start_loc, num_reqs, num_tokens: [reqs + 1], the requests, and tokens with padding.
        group_size: query heads per KV head.
        out_stride_token, out_stride_head, lse_stride_token, lse_stride_head: in elements.
    """

    out: Any
    lse: Any
    partials: Any
    semaphores: Any
    partial_rows: Any
    query_start_loc: Any
    num_reqs: Any
    num_tokens: Any
    group_size: Any
    out_stride_token: Any
    out_stride_head: Any
    lse_stride_token: Any
    lse_stride_head: Any


@gluon.jit
def locate_partial(
    output, segment, begins_here, row, layout: gl.constexpr, config: gl.constexpr
):
    """Return pointers to the accumulators, maxima and sums of rows of a partial result.

    Args:
        output: `OutputArgs`.
        segment: the segment.
        begins_here: 1 if the query tile begins in the segment, else 0.
        row: [rows] of the query tile.

    Returns:
        [rows, HEAD_DIM], [rows], [rows].
    """
    kv_heads = gl.num_programs(0)
    rows = gl.num_programs(1) * 2 * kv_heads * output.partial_rows
    slot = (segment * 2 + begins_here) * kv_heads + gl.program_id(0)
    row = slot * output.partial_rows + row  # fits 32 bits: the host has checked it
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, layout))
    offset = gl.expand_dims(row * config.HEAD_DIM, 1) + gl.expand_dims(column, 0)
    maxima = output.partials + rows * config.HEAD_DIM
    # rows begin at a multiple of 16 bytes
    accs = gl.multiple_of(output.partials + offset, [1, 16])
    return accs, maxima + row, maxima + rows + row
