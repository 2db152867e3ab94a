"""Consumer warpgroups of the Hopper append kernel: the mainloop of the prefill kernel, per item."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..config import (
    SWIZZLED,
    WARPGROUP_M,
    WORK_STAGES,
    acc_layout,
    count_q_stages,
    count_tokens,
    uses_ping_pong,
)
from ..consumer import Operands, attend_to_tiles, skip_tiles
from ..gluon_names import reinterpret
from ..invariant.fold import normalize_state
from ..invariant.rows import store_results
from ..pipeline import PipelineState, ping_pong_arrive, ping_pong_wait
from ..scheduler import NO_WORK, OwnTiles, find_tiles, receive_work
from ..score import softmax_scale
from .rows import store_partial
from .segments import BEGUN, KINDS, WHOLE


@gluon.jit
def consume_segment(
    shared,
    output,
    score,
    config: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run a consumer warpgroup: compute and store its rows of every published work item.

    Args:
        shared: `SharedStorage`.
        output: `OutputArgs`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    STAGES: gl.constexpr = config.STAGES
    PING_PONG: gl.constexpr = uses_ping_pong(HEAD_DIM)
    LAYOUT: gl.constexpr = acc_layout(HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dtype: gl.constexpr = shared.q.dtype
    k = reinterpret(shared.k, dtype, [STAGES, config.BLOCK_N, HEAD_DIM], SWIZZLED)
    v = reinterpret(shared.v, dtype, [STAGES, config.BLOCK_N, HEAD_DIM], SWIZZLED)
    k_tail = k
    if config.TAIL_DIM > 0:
        k_tail = reinterpret(
            shared.k_tail, dtype, [STAGES, config.BLOCK_N, config.TAIL_DIM], SWIZZLED
        )
    if PING_PONG and CONSUMER == NUM_CONSUMERS - 1:
        # the first warpgroup begins
        ping_pong_arrive(0)
    work_state = PipelineState.start(WORK_STAGES)
    kv_state = PipelineState.start(STAGES)
    q_state = PipelineState.start(count_q_stages(config))
    work = receive_work(shared, work_state)
    while work.num_kv_tiles != NO_WORK:
        acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, LAYOUT)
        m_i = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ROWS)
        l_i = gl.full([WARPGROUP_M], 0.0, gl.float32, ROWS)
        if work.num_kv_tiles > 0:
            tile = q_state.stage() * NUM_CONSUMERS + CONSUMER
            q = shared.q.index(tile)
            q_tail = q
            if config.TAIL_DIM > 0:
                q_tail = shared.q_tail.index(tile)
            shared.q_pipe.consumer_wait(q_state)
            position = work.position + CONSUMER * count_tokens(config)
            if position < work.seq_len:
                own = _find_own_tiles(work, position, config)
                kv_state = skip_tiles(
                    shared, kv_state, own.after, HEAD_DIM, NUM_CONSUMERS, CONSUMER
                )
                carry, kv_state = attend_to_tiles(
                    shared, Operands(q, q_tail, k, k_tail, v), acc, kv_state, q_state,
                    work, own, position, score.scale_log2, config, NUM_CONSUMERS,
                    CONSUMER,
                )  # fmt: skip
                kv_state = skip_tiles(
                    shared, kv_state, own.before, HEAD_DIM, NUM_CONSUMERS, CONSUMER
                )
                acc = carry.acc
                m_i = gl.convert_layout(carry.m_i, ROWS)
                l_i = gl.convert_layout(gl.sum(carry.l_i, 1), ROWS)
            else:
                # no row of this warpgroup is a query
                kv_state = _skip_all(
                    shared,
                    kv_state,
                    work.num_kv_tiles,
                    HEAD_DIM,
                    NUM_CONSUMERS,
                    CONSUMER,
                )
            shared.q_pipe.consumer_release(q_state)
            q_state = q_state.advance()
        _store(output, acc, m_i, l_i, work, score, config, CONSUMER)
        work_state = work_state.advance()
        work = receive_work(shared, work_state)
    if PING_PONG and CONSUMER == 0:
        # consume the last arrival, so that the named barrier ends as it began
        ping_pong_wait(0)


@gluon.jit
def _find_own_tiles(work, position, config: gl.constexpr):
    """Return the `OwnTiles` of a warpgroup; tiles without a mask are within its item."""
    own = find_tiles(work, position, config)
    full_end = gl.minimum(gl.maximum(own.full_end, own.first), own.last)
    full_begin = gl.minimum(gl.maximum(own.full_begin, own.first), full_end)
    return OwnTiles(own.after, own.last, full_end, full_begin, own.first, own.before)


@gluon.jit
def _skip_all(
    shared,
    kv_state,
    num_tiles,
    HEAD_DIM: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Release all KV tiles of a work item, and return the next KV state.

    Every tile but the first one is a turn of the ping-pong order, also of other warpgroups.
    """
    shared.k_pipe.consumer_wait(kv_state)
    shared.v_pipe.consumer_wait(kv_state)
    shared.k_pipe.consumer_release(kv_state)
    return skip_tiles(
        shared, kv_state.advance(), num_tiles - 1, HEAD_DIM, NUM_CONSUMERS, CONSUMER
    )


@gluon.jit
def _store(
    output, acc, m_i, l_i, work, score, config: gl.constexpr, CONSUMER: gl.constexpr
):
    """Store a warpgroup's rows: their results, or partial results of a split query tile."""
    LAYOUT: gl.constexpr = acc_layout(config.HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = CONSUMER * WARPGROUP_M + gl.arange(0, WARPGROUP_M, ROWS)  # [WARPGROUP_M]
    query = row // config.GROUP
    of_group = row % config.GROUP
    is_row = (query < work.seq_len - work.position) & (of_group < output.group_size)
    scale = softmax_scale(score.scale_log2, config)
    kind = work.head % KINDS
    if kind == WHOLE:
        head = work.head // KINDS * output.group_size + of_group
        sink = None
        if score.sinks is not None:
            sink = gl.load(score.sinks + head, mask=is_row, other=0.0)
        result, lse = normalize_state(acc, m_i, l_i, scale, sink)
        token = work.query_start + query
        store_results(output, result, lse, token, head, is_row, config)
    else:
        result, lse = normalize_state(acc, m_i, l_i, scale, None)
        begins_here = (kind == BEGUN).to(gl.int32)
        store_partial(output, result, lse, row, is_row, begins_here, config)
