"""Rows of batch-invariant query tiles, and where their results and states are stored.

A query tile has the rows of several tokens and of the query heads that share a KV head. Row r is
query head r % GROUP of token r // GROUP. If the heads are not a power of two, some rows are unused.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def count_live_tokens(output):
    """Return the tokens of requests; further rows are of no request."""
    return gl.load(output.query_start_loc + output.num_reqs).to(gl.int32)


@gluon.jit
def store_rows(output, acc, token, head, is_row, config: gl.constexpr):
    """Store rows of the output.

    Args:
        output: `InvariantArguments` or `FoldArguments`.
        acc: [rows, HEAD_DIM].
        token, head, is_row: [rows].
    """
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, acc.type.layout))
    offset = token.to(gl.int64) * output.out_stride_token
    offset += head.to(gl.int64) * output.out_stride_head  # [rows]
    mask = gl.expand_dims(is_row, 1)
    if config.HEAD_SIZE < config.HEAD_DIM:
        mask = mask & gl.expand_dims(column < config.HEAD_SIZE, 0)
    address = output.out + gl.expand_dims(offset, 1) + gl.expand_dims(column, 0)
    # rows begin at a multiple of 16 bytes
    address = gl.multiple_of(address, [1, 16])
    gl.store(address, acc.to(output.out.dtype.element_ty), mask=mask)


@gluon.jit
def store_lse(output, lse, token, head, is_row):
    """Store rows of the log-sum-exp, unless it is None."""
    if output.lse is not None:
        offset = token.to(gl.int64) * output.lse_stride_token
        offset += head.to(gl.int64) * output.lse_stride_head
        gl.store(output.lse + offset, lse, mask=is_row)


@gluon.jit
def locate_states(
    output, split, token, head, begin, layout: gl.constexpr, config: gl.constexpr
):
    """Return pointers to the accumulators, maxima and sums of rows in one split.

    Args:
        output: `InvariantArguments` or `FoldArguments`.
        token, head: [rows].
        begin: offset of the shared states in `output.states`.

    Returns:
        [rows, HEAD_DIM], [rows], [rows].
    """
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, layout))
    rows = output.num_tokens.to(gl.int64) * output.num_heads
    row = split * rows + token.to(gl.int64) * output.num_heads + head  # [rows]
    states = output.states + begin
    accs = states + gl.expand_dims(row * config.HEAD_DIM, 1) + gl.expand_dims(column, 0)
    maxima = states + output.num_splits * rows * config.HEAD_DIM
    # rows begin at a multiple of 16 bytes
    accs = gl.multiple_of(accs, [1, 16])
    return accs, maxima + row, maxima + output.num_splits * rows + row
