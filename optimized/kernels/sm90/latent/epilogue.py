"""Output of the Hopper latent decode kernel: finished rows, and partial results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import LN_2
from .config import BLOCK_M, HALF, RANK, acc_layout


@gluon.jit
def _partial_row(output, segment, item, row):
    """Return the offset of partial rows in [segments, 2, partial_rows]."""
    partial = segment.index * 2 + (item.begin == 0).to(gl.int32)
    return partial.to(gl.int64) * output.partial_rows + row


@gluon.jit
def store_no_split(output, segment):
    """Store that no row tile begins in the segment and ends in a later one, as far as is known."""
    gl.store(output.splits + 4 * segment.index, -1)


@gluon.jit
def store_split(output, batch, segment, item):
    """Store which row tile begins in the segment and ends in a later one, and in which."""
    # the item begins with its unit and ends with the segment
    end = (segment.index - segment.partition_index + 1) * segment.length
    end += item.num_tiles - item.end
    split = output.splits + 4 * segment.index
    gl.store(split, segment.partition_index + (end - 1) // segment.length)
    gl.store(split + 1, item.query_start * batch.num_heads + item.row_tile * BLOCK_M)
    gl.store(split + 2, gl.minimum(item.num_rows, BLOCK_M))


@gluon.jit
def store_half(output, batch, segment, item, acc, CONSUMER: gl.constexpr):
    """Store half of the value columns of an item's rows.

    Args:
        acc: [BLOCK_M, HALF] normalized rows.
    """
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, acc_layout()))  # [BLOCK_M]
    is_row = row < item.num_rows
    column = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, acc_layout()))
    is_value = is_row[:, None] & (column >= 0)[None, :]
    if item.end - item.begin == item.num_tiles:
        row += item.row_tile * BLOCK_M
        token = item.query_start + row // batch.num_heads
        offset = token.to(gl.int64) * output.out_stride_token
        offset += (row % batch.num_heads) * output.out_stride_head
        # rows begin at a multiple of 16 bytes
        address = gl.multiple_of(
            output.out + offset[:, None] + column[None, :], [1, 16]
        )
        gl.store(address, acc.to(output.out.dtype.element_ty), mask=is_value)
    else:
        is_value = is_value & (row < output.partial_rows)[:, None]
        offset = _partial_row(output, segment, item, row) * RANK
        partial = gl.multiple_of(
            output.partial_out + offset[:, None] + column[None, :], [1, 16]
        )
        gl.store(partial, acc, mask=is_value)


@gluon.jit
def store_lse(output, batch, segment, item, lse):
    """Store the log-sum-exp of an item's rows.

    Args:
        lse: [BLOCK_M] in base 2.
    """
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, acc_layout()))  # [BLOCK_M]
    is_row = row < item.num_rows
    if item.end - item.begin < item.num_tiles:
        offset = _partial_row(output, segment, item, row)
        is_row = is_row & (row < output.partial_rows)
        gl.store(output.partial_lse + offset, lse, mask=is_row)
    elif output.lse is not None:
        row += item.row_tile * BLOCK_M
        token = item.query_start + row // batch.num_heads
        offset = token.to(gl.int64) * output.lse_stride_token
        offset += (row % batch.num_heads).to(gl.int64) * output.lse_stride_head
        gl.store(output.lse + offset, lse * LN_2, mask=is_row)
