"""Roles of the producer warps in the Hopper prefill kernel.

Producer warp 0 takes work items from the tile scheduler, publishes them and loads Q and K. Producer
warp 1 loads V.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..common.config import (
    SWIZZLED,
    WARPGROUP_M,
    WORK_STAGES,
    count_q_stages,
    count_rows,
    count_tokens,
)
from ..common.gluon_names import async_load, reinterpret
from ..common.load_kv import load_k, load_v
from ..common.pipeline import PipelineState, packed_q
from ..common.work_item import NO_WORK, publish_end, publish_work, receive_work
from .scheduler import (
    fetch_and_increment,
    find_request,
    first_lane,
    load_request,
    locate_work,
    reset_counter,
)


class TmaTensor(NamedTuple):
    """A tensor of heads as a plane of rows, which TMA addresses by row and column.

    Args:
        desc: the tensor map. That of padded heads, and with several query heads in a tile that of
            queries and outputs, has a dimension of heads: rows, heads and columns. Then the steps
            from head to head are not used; `head_rows` of keys and values is 0.
        block_rows: rows from cache block to cache block; 0 without blocks.
        head_rows, head_columns: rows and columns from head to head; one of them is 0.
    """

    desc: Any
    block_rows: Any
    head_rows: Any
    head_columns: Any


@gluon.jit
def produce_q_and_k(
    shared,
    batch,
    q,
    k,
    work_counter,
    config: gl.constexpr,
):
    """Run producer warp 0: schedule the work items, and load their Q and K tiles."""
    TILE_TOKENS: gl.constexpr = config.CONSUMERS * count_tokens(config)
    PAGED: gl.constexpr = config.BLOCK_SIZE > 0
    work_state = PipelineState.start(WORK_STAGES)
    k_state = PipelineState.start(config.STAGES)
    q_state = PipelineState.start(count_q_stages(config))
    item = gl.program_id(0)
    zero = gl.to_tensor(0)
    items = find_request(batch, item, zero, zero, TILE_TOKENS)
    request = load_request(batch, items.req, PAGED)
    while items.req >= 0:
        # fetched now, needed after this item's keys
        fetched = fetch_and_increment(work_counter)
        work = locate_work(batch, item, items, request, config, TILE_TOKENS)
        publish_work(shared, work_state, work, config)
        work_state = work_state.advance()
        if work.num_kv_tiles > 0:
            load_q(shared, q, q_state, work, config)
            q_state = q_state.advance()
            k_state = load_k(shared, batch, k, k_state, work, config)
        item = gl.num_programs(0) + first_lane(fetched)
        if item >= items.end_item:
            items = find_request(
                batch, item, items.scanned_reqs, items.scanned_items, TILE_TOKENS
            )
            request = load_request(batch, items.req, PAGED)
    publish_end(shared, work_state, config)
    reset_counter(work_counter)


@gluon.jit
def produce_v(shared, batch, v, config: gl.constexpr):
    """Run producer warp 1: load the V tiles of the published work items."""
    work_state = PipelineState.start(WORK_STAGES)
    v_state = PipelineState.start(config.STAGES)
    tail_state = PipelineState.start(1)
    work = receive_work(shared, work_state, config)
    while work.num_kv_tiles != NO_WORK:
        if work.num_kv_tiles > 0:
            v_state, tail_state = load_v(
                shared, batch, v, v_state, tail_state, work, config
            )
        work_state = work_state.advance()
        work = receive_work(shared, work_state, config)


@gluon.jit
def load_q(shared, q, state, work, config: gl.constexpr):
    """Load the query tile of every consumer warpgroup."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    TAIL_DIM: gl.constexpr = config.TAIL_DIM
    CONSUMERS: gl.constexpr = config.CONSUMERS
    # the columns of a box: all, or 64 of a tile whose columns are not a power of two
    Q_COLUMNS: gl.constexpr = q.desc.block_type.shape[-1]
    BOXES: gl.constexpr = HEAD_DIM // Q_COLUMNS
    STORED: gl.constexpr = shared.q.shape[0] * BOXES
    boxes = reinterpret(
        shared.q, q.desc.dtype, [STORED, WARPGROUP_M, Q_COLUMNS], SWIZZLED
    )
    shared.q_pipe.producer_acquire(state)
    full = shared.q_pipe.full_barrier(state)
    row = work.query_start + work.head * q.head_rows
    column = work.head * q.head_columns
    # rows without a token are not loaded: they have whatever the memory held
    ROWS: gl.constexpr = count_rows(config)
    mbarrier.expect(full, CONSUMERS * ROWS * (HEAD_DIM + TAIL_DIM) * 2)
    for consumer in gl.static_range(CONSUMERS):
        tile = state.stage() * CONSUMERS + consumer
        if len(q.desc.block_type.shape) == 3:
            token = work.query_start + consumer * count_tokens(config)
            async_load(
                q.desc,
                [token, work.head * config.GROUP, 0],
                full,
                packed_q(shared, config).index(tile),
            )
        else:
            tile_row = row + consumer * WARPGROUP_M
            for j in gl.static_range(BOXES):
                async_load(
                    q.desc,
                    [tile_row, column + j * Q_COLUMNS],
                    full,
                    boxes.index(tile * BOXES + j),
                )
            if TAIL_DIM > 0:
                tail = shared.q_tail.index(tile)
                async_load(q.desc, [tile_row, column + HEAD_DIM], full, tail)
