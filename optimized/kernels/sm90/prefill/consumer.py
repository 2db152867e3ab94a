"""Role of the consumer warpgroups in the Hopper prefill kernel.

A consumer warpgroup computes WARPGROUP_M rows of each work item: the mainloop over its KV tiles
(`common/mainloop.py`), then normalization and store (`epilogue.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..common.config import (
    WARPGROUP_M,
    WORK_STAGES,
    acc_columns,
    acc_layout,
    count_q_stages,
    count_tokens,
    has_lower_bound,
    has_own_tiles,
    has_unused_rows,
)
from ..common.mainloop import attend_to_tiles, skip_tiles
from ..common.mma import clear_acc, number_columns, select_tiles, view_kv
from ..common.pipeline import PipelineState, end_ping_pong, packed_q, start_ping_pong
from ..common.score import softmax_scale
from ..common.softmax import rescale
from ..common.tile_range import find_tiles
from ..common.work_item import NO_WORK, find_rows, receive_work
from .epilogue import normalize, store_tile


@gluon.jit
def consume(
    shared,
    output,
    score,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run a consumer warpgroup: compute and store its rows of every published work item.

    Args:
        shared: `SharedStorage`.
        output: `PrefillOutput`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    Q_STAGES: gl.constexpr = count_q_stages(config)
    PARTS: gl.constexpr = acc_columns(config)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, acc_layout(PARTS[0][1]))
    k, k_tail, v = view_kv(shared, config)
    # computed before the loop: in `store_tile` they would change what is spilled
    column = ()
    for i in gl.static_range(len(PARTS)):
        of_part = number_columns(PARTS[i][0], PARTS[i][1])
        column = column + (of_part,)  # type: ignore[assignment]  # noqa: RUF005
    row = CONSUMER * WARPGROUP_M + gl.arange(0, WARPGROUP_M, ACC_ROWS)
    start_ping_pong(config, CONSUMER)
    work_state = PipelineState.start(WORK_STAGES)
    kv_state = PipelineState.start(config.STAGES)
    q_state = PipelineState.start(Q_STAGES)
    work = receive_work(shared, work_state, config)
    while work.num_kv_tiles != NO_WORK:
        acc = clear_acc(config)
        lse = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ACC_ROWS)
        sink = None
        scale_log2 = score.scale_log2
        if score.k_scales is not None:
            # the query heads of a tile share a KV head and its scales
            scale_log2 *= gl.load(score.k_scales + work.head * config.GROUP)
        token, head = find_rows(work, row, config)
        if score.sinks is not None:
            # loaded here, needed after this item's keys
            sink = gl.load(score.sinks + head)
            lse = gl.full([WARPGROUP_M], 0.0, gl.float32, ACC_ROWS) + sink
        q_tile = q_state.stage() * config.CONSUMERS + CONSUMER
        tiles = select_tiles(shared, q_tile, k, k_tail, v, config)
        staging = tiles.q
        if len(output.plane.desc.block_type.shape) == 3:
            staging = packed_q(shared, config).index(q_tile)
        if work.num_kv_tiles > 0:
            carry, kv_state = _mainloop(
                shared, tiles, acc, kv_state, q_state, work,
                scale_log2, config, CONSUMER,
            )  # fmt: skip
            scale = softmax_scale(scale_log2, config)
            acc, lse = normalize(carry.acc, carry.m_i, carry.l_i, scale, sink)
            if score.v_scales is not None:
                v_scale = gl.load(score.v_scales + work.head * config.GROUP)
                acc = rescale(
                    acc, gl.full(lse.shape, v_scale, gl.float32, lse.type.layout)
                )
            q_state = q_state.advance()
        if has_unused_rows(config):
            # again, so that they take no registers in the main loops
            token, head = find_rows(work, row, config)
        store_tile(
            output,
            tiles.q,
            staging,
            acc,
            lse,
            work,
            token,
            head,
            column,
            config,
            CONSUMER,
        )
        if Q_STAGES == 1 and work.num_kv_tiles > 0:
            # the output has been stored: the stage may take the next queries
            tma.store_wait(0)
            shared.q_pipe.consumer_release(q_state.previous())
        work_state = work_state.advance()
        work = receive_work(shared, work_state, config)
    end_ping_pong(config, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def _mainloop(
    shared,
    tiles,
    acc,
    kv_state,
    q_state,
    work,
    scale_log2,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Return the `Carry` after all KV tiles of a work item, and the next KV state.

    Args:
        tiles: `Operands`.
        acc: [WARPGROUP_M, columns] zeros of each part of `acc_columns`.
    """
    position = work.position + CONSUMER * count_tokens(config)
    own = find_tiles(work, position, config)
    if has_own_tiles(config):
        kv_state = skip_tiles(shared, kv_state, own.after, config, CONSUMER)
    carry, kv_state = attend_to_tiles(
        shared, tiles, acc, kv_state, q_state, work, own, position, scale_log2,
        config, CONSUMER,
    )  # fmt: skip
    if has_lower_bound(config):
        kv_state = skip_tiles(shared, kv_state, own.before, config, CONSUMER)
    return carry, kv_state
