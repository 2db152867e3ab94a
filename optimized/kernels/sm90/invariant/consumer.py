"""Consumer warpgroups of the batch-invariant Hopper kernel: fixed splits of keys, and their fold.

The keys of a sequence are cut at multiples of SPLIT_TILES KV tiles, counted from its first key. A
warpgroup computes its splits from the last to the first, each from nothing, and folds their states
in this order. In between, the folded accumulator is in global memory, where each thread reads what
it wrote itself. Tiles in which a row has no visible key leave its state as it is, bit by bit: its
weights are exactly 0, and alpha is exactly 1. So a row does not depend on the other rows of its
tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..common.config import WARPGROUP_M
from ..common.gluon_names import async_store
from ..common.mainloop import attend_to_tiles
from ..common.mma import select_tiles
from ..common.own_tiles import skip_tiles
from ..common.pipeline import (
    ping_pong_arrive,
    ping_pong_wait,
    release_previous_q,
    release_stored_q,
)
from ..common.roles import consume_items
from ..common.score import softmax_scale
from ..common.storage import view_box, view_output
from ..common.tile_range import find_tiles
from ..common.traits import acc_layout, count_tokens, uses_ping_pong
from .fold import fold, normalize_state
from .rows import count_live_tokens, locate_states, store_lse, store_rows
from .scheduler import find_split


@gluon.jit
def consume_splits(shared, output, score, config: gl.constexpr, CONSUMER: gl.constexpr):
    """Run a consumer warpgroup. The first one then clears the rows of no request.

    Args:
        shared: `SharedStorage`.
        output: `InvariantArguments`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    consume_items(shared, (output, score), compute_splits, config, CONSUMER)
    tma.store_wait(0)
    if CONSUMER == 0:
        _clear_padding(output, config)


@gluon.jit
def compute_splits(
    shared, kv, kv_state, q_state, work, args,
    config: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute and store a warpgroup's rows of a work item (`roles.consume_items`).

    Args:
        args: `InvariantArguments` and `ScoreArgs`.
    """
    output, score = args
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    LAYOUT: gl.constexpr = acc_layout(HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, LAYOUT)
    m_i = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ROWS)
    l_i = gl.full([WARPGROUP_M], 0.0, gl.float32, ROWS)
    tiles = select_tiles(shared, kv, q_state, config, CONSUMER)
    if work.num_kv_tiles > 0:
        shared.q_pipe.consumer_wait(q_state)
        release_previous_q(shared, q_state, config)
        acc, m_i, l_i, kv_state = _attend_to_splits(
            shared, tiles, acc, m_i, l_i, kv_state,
            q_state, work, output.states, score.scale_log2, config,
            CONSUMER,
        )  # fmt: skip
        q_state = q_state.advance()
    _store(shared, output, tiles.q_tile, acc, m_i, l_i, work, score, config, CONSUMER)
    release_stored_q(shared, q_state, work, config)
    return kv_state, q_state


@gluon.jit
def _own_states(
    output_states,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Return pointers to the accumulator that a warpgroup keeps.  # [WARPGROUP_M, HEAD_DIM]"""
    LAYOUT: gl.constexpr = acc_layout(config.HEAD_DIM)
    row = gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, config.HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    first = (gl.program_id(0) * config.CONSUMERS + CONSUMER) * (
        WARPGROUP_M * config.HEAD_DIM
    )
    offset = gl.expand_dims(row * config.HEAD_DIM, 1) + gl.expand_dims(column, 0)
    # rows begin at a multiple of 16 bytes
    return gl.multiple_of(output_states + first + offset, [1, 16])


@gluon.jit
def _attend_to_splits(
    shared,
    tiles,
    acc,
    m_i,
    l_i,
    kv_state,
    q_state,
    work,
    states,
    scale_log2,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Return acc, m_i and l_i after all KV tiles of a work item, and the next KV state.

    Args:
        tiles: `Operands`.
        acc: [WARPGROUP_M, HEAD_DIM] zeros.
        m_i, l_i: [WARPGROUP_M] -inf and 0.
        states: where warpgroups keep accumulators.
    """
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    LAYOUT: gl.constexpr = acc_layout(HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    PING_PONG: gl.constexpr = uses_ping_pong(config)
    position = work.position + CONSUMER * count_tokens(config)
    own = find_tiles(work, position, config)
    last = own.last
    after = own.after
    before = own.before
    if CONSUMER > 0 and not PING_PONG:  # noqa: SIM102 (a constexpr branch)
        if position >= work.seq_len:
            # no row of this warpgroup is a query
            last = own.first - 1
            after = work.num_kv_tiles
            before = before * 0
    kv_state = skip_tiles(shared, kv_state, after, config, CONSUMER)
    own_last = last
    while last >= own.first:
        of_split = find_split(own, last, config)
        if PING_PONG:  # noqa: SIM102 (a constexpr branch)
            if last < own_last:
                # every tile but the first of a work item is a turn, also of other warpgroups
                ping_pong_wait(CONSUMER)
                ping_pong_arrive((CONSUMER + 1) % config.CONSUMERS)
        split_acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, LAYOUT)
        carry, kv_state = attend_to_tiles(
            shared, tiles, (split_acc,), kv_state, q_state, work, of_split, position,
            scale_log2, config, CONSUMER,
        )  # fmt: skip
        split_m = gl.convert_layout(carry.m_i, ROWS)
        split_l = gl.convert_layout(gl.sum(carry.l_i, 1), ROWS)
        if last == own_last:
            acc = carry.acc[0]
            m_i = split_m
            l_i = split_l
        else:
            kept = gl.load(_own_states(states, config, CONSUMER))
            acc, m_i, l_i = fold(
                kept, m_i, l_i, carry.acc[0], split_m, split_l,
                softmax_scale(scale_log2, config),
            )  # fmt: skip
        if of_split.first > own.first:
            gl.store(_own_states(states, config, CONSUMER), acc)
        last = of_split.first - 1
    kv_state = skip_tiles(shared, kv_state, before, config, CONSUMER)
    return acc, m_i, l_i, kv_state


@gluon.jit
def _store(
    shared, output, q_tile, acc, m_i, l_i, work, score,
    config: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Store a warpgroup's rows: their results, or their states if programs share them.

    Args:
        q_tile: index of the query tile, which was read.
    """
    LAYOUT: gl.constexpr = acc_layout(config.HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.arange(0, WARPGROUP_M, ROWS)  # [WARPGROUP_M]
    query = CONSUMER * count_tokens(config) + row // config.GROUP
    of_group = row % config.GROUP
    token = work.query_start + query
    head = work.head * output.group_size + of_group
    is_row = (query < work.seq_len - work.position) & (of_group < output.group_size)
    if output.num_splits > 1:
        begin = gl.num_programs(0) * (config.CONSUMERS * WARPGROUP_M * config.HEAD_DIM)
        accs, maxima, sums = locate_states(
            output, work.split, token, head, begin, LAYOUT, config
        )
        gl.store(accs, acc, mask=gl.expand_dims(is_row, 1))
        gl.store(maxima, m_i, mask=is_row)
        gl.store(sums, l_i, mask=is_row)
    else:
        sink = None
        if score.sinks is not None:
            sink = gl.load(score.sinks + head, mask=is_row, other=0.0)
        scale = softmax_scale(score.scale_log2, config)
        result, lse = normalize_state(acc, m_i, l_i, scale, sink)
        # by TMA if the tile has no row of another request or head
        first_token = CONSUMER * count_tokens(config)
        is_whole = work.seq_len - work.position >= first_token + count_tokens(config)
        is_whole &= (work.num_kv_tiles > 0) & (output.group_size == config.GROUP)
        if is_whole:
            tile = view_output(shared, q_tile, config)
            tile.store(result.to(tile.dtype))
            fence_async_shared()
            first_head = work.head * config.GROUP
            box = [work.query_start + first_token, first_head, 0]
            staging = view_box(shared.q, output.out_desc, q_tile, 0, config)
            async_store(output.out_desc, box, staging)
        else:
            store_rows(output, result, token, head, is_row, config)
        store_lse(output, lse, token, head, is_row)


@gluon.jit
def _clear_padding(output, config: gl.constexpr):
    """Store 0 and -inf to the rows of no request."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    LAYOUT: gl.constexpr = acc_layout(HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.arange(0, WARPGROUP_M, ROWS)  # [WARPGROUP_M]
    acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, LAYOUT)
    lse = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ROWS)
    end = count_live_tokens(output)
    for token in range(end + gl.program_id(0), output.num_tokens, gl.num_programs(0)):
        for first_head in range(0, output.num_heads, WARPGROUP_M):
            head = first_head + row
            is_row = head < output.num_heads
            store_rows(output, acc, token + row * 0, head, is_row, config)
            store_lse(output, lse, token + row * 0, head, is_row)
