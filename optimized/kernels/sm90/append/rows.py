"""Rows of query tiles of the Hopper append kernel, and where their partial results are stored.

A query tile has the rows of several tokens and of the query heads that share a KV head. Row r is
query head r % GROUP of token r // GROUP. If the heads are not a power of two, some rows are unused.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _locate_rows(output, first, segment, row):
    """Return the index of rows among the rows of all partial results, and how many there are.

    Args:
        output: `AppendArguments`.
        first: segment in which the query tile begins.
        segment, row: segment of the partial result, and row of the query tile.
    """
    kv_heads = gl.num_programs(0)
    num_rows = gl.num_programs(1) * 2 * kv_heads * output.partial_rows
    begins_here = (segment == first).to(gl.int32)
    slot = (segment * 2 + begins_here) * kv_heads + gl.program_id(0)
    # fits 32 bits: the host has checked it
    return slot * output.partial_rows + row, num_rows


@gluon.jit
def locate_partial(
    output, first, segment, row, layout: gl.constexpr, config: gl.constexpr
):
    """Return pointers to the rows of a partial result, and to their log-sum-exps.

    Args:
        output: `AppendArguments`.
        first: segment in which the query tile begins.
        segment: of the partial result.
        row: [rows] of the query tile.
        layout: of the rows.

    Returns:
        [rows, HEAD_DIM], [rows].
    """
    index, num_rows = _locate_rows(output, first, segment, row)
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, layout))
    offset = gl.expand_dims(index * config.HEAD_DIM, 1) + gl.expand_dims(column, 0)
    lses = output.partials + num_rows * config.HEAD_DIM
    # rows begin at a multiple of 16 bytes
    return gl.multiple_of(output.partials + offset, [1, 16]), lses + index


@gluon.jit
def locate_partials(
    output, first, segment, row, layout: gl.constexpr, config: gl.constexpr
):
    """Return pointers to rows of several partial results, and to their log-sum-exps.

    Args:
        output, first, row, layout: as in `locate_partial`.
        segment: [partial results].

    Returns:
        [partial results, rows, HEAD_DIM], [partial results, rows].
    """
    index, num_rows = _locate_rows(
        output, first, gl.expand_dims(segment, 1), gl.expand_dims(row, 0)
    )
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 1)
    offset = gl.expand_dims(index * config.HEAD_DIM, 2) + column
    lses = output.partials + num_rows * config.HEAD_DIM
    # rows begin at a multiple of 16 bytes
    return gl.multiple_of(output.partials + offset, [1, 1, 16]), lses + index
