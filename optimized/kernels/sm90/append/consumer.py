"""Consumer warpgroups of the Hopper append kernel: the mainloop of the prefill kernel, per item."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import LOG2_E, WARP_SIZE, WARPGROUP_M
from ..common.gluon_names import barrier
from ..common.mma import select_tiles
from ..common.own_tiles import attend_to_item, skip_tiles
from ..common.roles import consume_items
from ..common.score import softmax_scale
from ..common.tile_range import OwnTiles, find_tiles
from ..common.traits import acc_layout, count_tokens, warp_layout
from ..common.work_item import find_segments
from ..invariant.fold import normalize_state
from ..invariant.rows import store_lse, store_rows
from .combine import combine_rows, find_row, finish_rows
from .rows import locate_partial


@gluon.jit
def consume_segment(
    shared, output, score, config: gl.constexpr, CONSUMER: gl.constexpr
):
    """Run a consumer warpgroup. The last one clears the rows of no request before.

    Args:
        shared: `SharedStorage`.
        output: `AppendArguments`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    if CONSUMER == config.CONSUMERS - 1:
        _clear_padding(output, config)
    consume_items(shared, (output, score), compute_tile, config, CONSUMER)


@gluon.jit
def compute_tile(
    shared, kv, kv_state, q_state, work, args,
    config: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute and store a warpgroup's rows of a work item (`roles.consume_items`).

    Args:
        args: `AppendArguments` and `ScoreArgs`.
    """
    output, score = args
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    LAYOUT: gl.constexpr = acc_layout(HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, LAYOUT)
    m_i = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ROWS)
    l_i = gl.full([WARPGROUP_M], 0.0, gl.float32, ROWS)
    if work.num_kv_tiles > 0:
        tiles = select_tiles(shared, kv, q_state, config, CONSUMER)
        shared.q_pipe.consumer_wait(q_state)
        position = work.position + CONSUMER * count_tokens(config)
        if position < work.seq_len:
            own = _find_own_tiles(work, position, config)
            carry, kv_state = attend_to_item(
                shared, tiles, (acc,), kv_state, q_state, work, own, position,
                score.scale_log2, config, CONSUMER,
            )  # fmt: skip
            acc = carry.acc[0]
            m_i = gl.convert_layout(carry.m_i, ROWS)
            l_i = gl.convert_layout(gl.sum(carry.l_i, 1), ROWS)
        else:
            # no row of this warpgroup is a query
            kv_state = _skip_all(shared, kv_state, work.num_kv_tiles, config, CONSUMER)
        shared.q_pipe.consumer_release(q_state)
        q_state = q_state.advance()
    _store(output, acc, m_i, l_i, work, score, config, CONSUMER)
    return kv_state, q_state


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
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Release all KV tiles of a work item, and return the next KV state.

    Every tile but the first one is a turn of the ping-pong order, also of other warpgroups.
    """
    shared.k_pipe.consumer_wait(kv_state)
    shared.v_pipe.consumer_wait(kv_state)
    shared.k_pipe.consumer_release(kv_state)
    return skip_tiles(shared, kv_state.advance(), num_tiles - 1, config, CONSUMER)


@gluon.jit
def _store(
    output, acc, m_i, l_i, work, score,
    config: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Store a warpgroup's rows of a query tile.

    If the query tile spans several segments, they are a partial result. The warpgroup that arrives
    last combines all of them.
    """
    LAYOUT: gl.constexpr = acc_layout(config.HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = CONSUMER * WARPGROUP_M + gl.arange(0, WARPGROUP_M, ROWS)  # [WARPGROUP_M]
    scale = softmax_scale(score.scale_log2, config)
    first, last = find_segments(work)
    if first < last:
        _, _, is_row = find_row(row, work, output, config)
        is_kept = is_row & (row < output.partial_rows)
        outs, lses = locate_partial(
            output, first, gl.program_id(1), row, LAYOUT, config
        )
        result, lse = normalize_state(acc, m_i, l_i, scale, None)
        gl.store(outs, result, mask=gl.expand_dims(is_kept, 1))
        gl.store(lses, lse * LOG2_E, mask=is_kept)
        semaphore = output.semaphores + CONSUMER
        semaphore += (first * gl.num_programs(0) + gl.program_id(0)) * config.CONSUMERS
        if arrive(semaphore, last - first + 1):
            combine_rows(output, first, last, work, score, config, CONSUMER)
    else:
        finish_rows(output, acc, m_i, l_i, row, work, scale, score, config)


@gluon.jit
def arrive(semaphore, num_arrivals):
    """Count this warpgroup's arrival; return whether it is the last, which resets the counter."""
    layout: gl.constexpr = warp_layout(gl.num_warps())
    # all threads have stored before one of them arrives
    barrier()
    thread = gl.arange(0, WARP_SIZE * gl.num_warps(), layout)
    one = gl.full([WARP_SIZE * gl.num_warps()], 1, gl.int32, layout)
    before = gl.atomic_add(
        semaphore + thread * 0, one, mask=thread == 0, sem="acq_rel", scope="gpu"
    )
    before = gl.sum(gl.where(thread == 0, before, 0), 0)
    is_last = before == num_arrivals - 1
    if is_last:
        gl.store(semaphore, 0)
    return is_last


@gluon.jit
def _clear_padding(output, config: gl.constexpr):
    """Store 0 and -inf to the rows of no request, divided among the programs."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    LAYOUT: gl.constexpr = acc_layout(HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.arange(0, WARPGROUP_M, ROWS)  # [WARPGROUP_M]
    acc = gl.zeros([WARPGROUP_M, HEAD_DIM], gl.float32, LAYOUT)
    lse = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ROWS)
    live = gl.load(output.query_start_loc + output.num_reqs).to(gl.int32)
    num_rows = (output.num_tokens - live) * output.group_size
    step = gl.num_programs(1) * WARPGROUP_M
    for begin in range(gl.program_id(1) * WARPGROUP_M, num_rows, step):
        token = live + (begin + row) // output.group_size
        head = gl.program_id(0) * output.group_size + (begin + row) % output.group_size
        is_row = begin + row < num_rows
        store_rows(output, acc, token, head, is_row, config)
        store_lse(output, lse, token, head, is_row)
