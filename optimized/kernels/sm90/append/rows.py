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
        partial_out: [segments, 2, KV heads, partial_rows, HEAD_DIM] normalized rows of a segment:
            of the query tile that began in an earlier segment, and of the one that begins here.
        partial_lse: [segments, 2, KV heads, partial_rows] their log-sum-exp.
        spans: [segments, KV heads, SPAN_FIELDS] int32 query tile that begins in a segment and ends
            in a later one: its first token in the batch, its tokens, and its last segment. The
            tokens are 0 if there is none.
        partial_rows: rows of a query tile, at most, for which there is memory.
        group_size: query heads per KV head.
        out_stride_token, out_stride_head, lse_stride_token, lse_stride_head: in elements.
    """

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    spans: Any
    partial_rows: Any
    group_size: Any
    out_stride_token: Any
    out_stride_head: Any
    lse_stride_token: Any
    lse_stride_head: Any


SPAN_FIELDS = gl.constexpr(4)
"""Numbers per span, of which three are used."""


@gluon.jit
def store_partial(output, acc, lse, row, is_row, begins_here, config: gl.constexpr):
    """Store a warpgroup's rows of a query tile that spans several segments.

    Args:
        output: `OutputArgs`.
        acc: [WARPGROUP_M, HEAD_DIM] normalized rows.
        lse: [WARPGROUP_M].
        row, is_row: [WARPGROUP_M] rows of the query tile.
        begins_here: 1 if the query tile begins in this program's segment, else 0.
    """
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, acc.type.layout))
    slot = (gl.program_id(1) * 2 + begins_here) * gl.num_programs(0) + gl.program_id(0)
    offset = slot.to(gl.int64) * output.partial_rows + row  # [WARPGROUP_M]
    is_row = is_row & (row < output.partial_rows)
    gl.store(output.partial_lse + offset, lse, mask=is_row)
    address = output.partial_out + gl.expand_dims(offset * config.HEAD_DIM, 1)
    gl.store(address + gl.expand_dims(column, 0), acc, mask=gl.expand_dims(is_row, 1))
