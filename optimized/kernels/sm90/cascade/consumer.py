"""Consumer warpgroups over a shared prefix: partial results of the published work items."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import (
    LOG2_E,
    WARPGROUP_M,
    WORK_STAGES,
    acc_layout,
    count_q_stages,
    count_tokens,
)
from ..common.mainloop import attend_to_tiles
from ..common.mma import select_tiles, view_kv
from ..common.pipeline import PipelineState, end_ping_pong, start_ping_pong
from ..common.score import softmax_scale
from ..common.tile_range import find_tiles
from ..common.work_item import NO_WORK, find_rows, receive_work
from ..prefill.epilogue import normalize


class PrefixOutput(NamedTuple):
    """Partial results over the prefix, which the second launch of a cascade merges.

    Args:
        out: [splits, tokens, heads, HEAD_SIZE] float32, normalized.
        lse: [splits, tokens, heads] float32 log-sum-exp in base 2.
        num_tokens, num_heads: tokens of all requests, and query heads.
    """

    out: Any
    lse: Any
    num_tokens: Any
    num_heads: Any


@gluon.jit
def consume_prefix(
    shared,
    output,
    score,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run a consumer warpgroup: compute and store its rows of every published work item.

    Args:
        shared: `SharedStorage`.
        output: `PrefixOutput`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    Q_STAGES: gl.constexpr = count_q_stages(config)
    k, k_tail, v = view_kv(shared, config)
    start_ping_pong(config, CONSUMER)
    work_state = PipelineState.start(WORK_STAGES)
    kv_state = PipelineState.start(config.STAGES)
    q_state = PipelineState.start(Q_STAGES)
    work = receive_work(shared, work_state, config)
    while work.num_kv_tiles != NO_WORK:
        acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, acc_layout(HEAD_DIM))
        q_tile = q_state.stage() * config.CONSUMERS + CONSUMER
        tiles = select_tiles(shared, q_tile, k, k_tail, v, config)
        position = work.position + CONSUMER * count_tokens(config)
        carry, kv_state = attend_to_tiles(
            shared, tiles, (acc,), kv_state, q_state, work,
            find_tiles(work, position, config), position, score.scale_log2, config, CONSUMER,
        )  # fmt: skip
        q_state = q_state.advance()
        if Q_STAGES == 1:
            # with two stages the next work item's first KV tile releases this one's
            shared.q_pipe.consumer_release(q_state.previous())
        scale = softmax_scale(score.scale_log2, config)
        acc, lse = normalize(carry.acc, carry.m_i, carry.l_i, scale, None)
        _store(output, acc[0], lse * LOG2_E, work, config, CONSUMER)
        work_state = work_state.advance()
        work = receive_work(shared, work_state, config)
    end_ping_pong(config, CONSUMER)


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
    row = token * output.num_heads + head  # [WARPGROUP_M]
    mask = gl.expand_dims(is_row, 1)
    if config.HEAD_SIZE < config.HEAD_DIM:
        mask = mask & gl.expand_dims(column < config.HEAD_SIZE, 0)
    offset = gl.expand_dims(row * config.HEAD_SIZE, 1) + gl.expand_dims(column, 0)
    # rows begin at a multiple of 16 bytes
    gl.store(gl.multiple_of(output.out + offset, [1, 16]), acc, mask=mask)
    gl.store(output.lse + row, lse, mask=is_row)
