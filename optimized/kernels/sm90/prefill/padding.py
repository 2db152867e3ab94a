"""Rows of no request: producer warp 1 of the Hopper prefill kernel clears them before it loads V.

A batch may have more tokens than its requests, as a captured graph has. The output rows of the
others are 0, and their log-sum-exp is -inf. The warp would wait for the first work item at that
time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import BOX_COLUMNS, WARP_SIZE
from ..common.roles import produce_v
from ..common.traits import clears_padding


@gluon.jit
def clear_and_produce_v(shared, batch, v, output, config: gl.constexpr):
    """Run producer warp 1: clear this program's share of the rows of no request, then load V.

    Args:
        shared, batch, v: arguments of `produce_v`.
        output: `PrefillArguments`.
    """
    if clears_padding(config):
        clear_padding(batch, output, output.cleared_tokens, config)
    produce_v(shared, batch, v, config)


@gluon.jit
def clear_padding(batch, output, cleared_tokens, config: gl.constexpr):
    """Store 0 and -inf to this program's share of the rows of no request."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [BOX_COLUMNS // WARP_SIZE], [WARP_SIZE], [gl.num_warps()], [0]
    )
    column = gl.arange(0, BOX_COLUMNS, LAYOUT)  # [64]
    zeros = gl.full([BOX_COLUMNS], 0.0, output.out.dtype.element_ty, LAYOUT)
    end = gl.load(batch.query_start_loc + batch.num_reqs).to(gl.int32)
    out_token, out_head = _widen(output.out_stride_token, output.out_stride_head)
    lse_token, lse_head = _widen(output.lse_stride_token, output.lse_stride_head)
    for token in range(end + gl.program_id(0), cleared_tokens, gl.num_programs(0)):
        for head in range(batch.num_heads * config.GROUP * config.ROWS_PER_TOKEN):
            row = output.out + token * out_token + head * out_head
            for i in gl.static_range(
                (config.HEAD_SIZE + BOX_COLUMNS - 1) // BOX_COLUMNS
            ):
                at = i * BOX_COLUMNS + column
                # rows begin at a multiple of 16 bytes
                address = gl.multiple_of(row + at, [16])
                gl.store(address, zeros, mask=at < config.HEAD_SIZE)
            if output.lse is not None:
                lse = output.lse + token * lse_token + head * lse_head
                gl.store(lse, -float("inf"))


@gluon.jit
def _widen(stride_token, stride_head):
    """Return two strides as int64."""
    return stride_token.to(gl.int64), stride_head.to(gl.int64)
