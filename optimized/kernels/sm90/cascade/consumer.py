"""Consumer warpgroups over a shared prefix: partial results of the published work items."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import LOG2_E, WARPGROUP_M
from ..common.mainloop import attend_to_tiles
from ..common.mma import select_tiles
from ..common.roles import consume_items
from ..common.score import softmax_scale
from ..common.tile_range import find_tiles
from ..common.traits import acc_layout, count_q_stages, count_tokens
from ..common.work_item import find_rows
from ..prefill.epilogue import normalize


@gluon.jit
def consume_prefix(shared, output, score, config: gl.constexpr, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup.

    Args:
        shared: `SharedStorage`.
        output: `PrefixArguments`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    consume_items(shared, (output, score), compute_partials, config, CONSUMER)


@gluon.jit
def compute_partials(
    shared, kv, kv_state, q_state, work, args,
    config: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute and store a warpgroup's rows of a work item (`roles.consume_items`).

    Args:
        args: `PrefixArguments` and `ScoreArgs`.
    """
    output, score = args
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, acc_layout(HEAD_DIM))
    tiles = select_tiles(shared, kv, q_state, config, CONSUMER)
    position = work.position + CONSUMER * count_tokens(config)
    carry, kv_state = attend_to_tiles(
        shared, tiles, (acc,), kv_state, q_state, work,
        find_tiles(work, position, config), position, score.scale_log2, config, CONSUMER,
    )  # fmt: skip
    q_state = q_state.advance()
    if count_q_stages(config) == 1:
        # with two stages the next work item's first KV tile releases this one's
        shared.q_pipe.consumer_release(q_state.previous())
    scale = softmax_scale(score.scale_log2, config)
    acc, lse = normalize(carry.acc, carry.m_i, carry.l_i, scale, None)
    _store(output, acc[0], lse * LOG2_E, work, config, CONSUMER)
    return kv_state, q_state


@gluon.jit
def _store(output, acc, lse, work, config: gl.constexpr, CONSUMER: gl.constexpr):
    """Store a warpgroup's rows.

    Args:
        acc: [WARPGROUP_M, HEAD_DIM] normalized rows.
        lse: [WARPGROUP_M] in base 2.
    """
    LAYOUT: gl.constexpr = acc_layout(config.HEAD_DIM)
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    row = gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, LAYOUT))
    in_item, head = find_rows(work, CONSUMER * WARPGROUP_M + row, config)
    is_row = in_item < work.seq_len - work.position  # [WARPGROUP_M]
    token = work.split.to(gl.int64) * output.num_tokens + work.query_start + in_item
    row = token * (output.num_heads * config.GROUP) + head  # [WARPGROUP_M]
    mask = gl.expand_dims(is_row, 1)
    if config.HEAD_SIZE < config.HEAD_DIM:
        mask = mask & gl.expand_dims(column < config.HEAD_SIZE, 0)
    offset = gl.expand_dims(row * config.HEAD_SIZE, 1) + gl.expand_dims(column, 0)
    # rows begin at a multiple of 16 bytes
    gl.store(gl.multiple_of(output.prefix_out + offset, [1, 16]), acc, mask=mask)
    gl.store(output.prefix_lse + row, lse, mask=is_row)
