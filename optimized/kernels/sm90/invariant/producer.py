"""Producer warp of the batch-invariant Hopper kernel: work items, and TMA loads of Q and K.

Values are loaded by the producer warp of the prefill kernel (`..producer.produce_v`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..common.config import (
    BOX_COLUMNS,
    WARPGROUP_M,
    WORK_STAGES,
    count_q_stages,
    count_tokens,
)
from ..common.gluon_names import async_load, reinterpret
from ..common.load_kv import load_k
from ..common.pipeline import PipelineState
from ..common.work_item import publish_end, publish_work
from ..prefill.scheduler import (
    fetch_and_increment,
    find_request,
    first_lane,
    load_request,
    reset_counter,
)
from .scheduler import locate_split


@gluon.jit
def produce_q_and_k(
    shared,
    batch,
    q_desc,
    k,
    output,
    work_counter,
    config: gl.constexpr,
):
    """Run producer warp 0: schedule the work items, and load their Q and K tiles."""
    TOKENS: gl.constexpr = config.CONSUMERS * count_tokens(config)
    PAGED: gl.constexpr = config.BLOCK_SIZE > 0
    work_state = PipelineState.start(WORK_STAGES)
    k_state = PipelineState.start(config.STAGES)
    q_state = PipelineState.start(count_q_stages(config))
    item = gl.program_id(0)
    zero = gl.to_tensor(0)
    items = find_request(batch, item, zero, zero, TOKENS)
    request = load_request(batch, items.req, PAGED)
    while items.req >= 0:
        # fetched now, needed after this item's keys
        fetched = fetch_and_increment(work_counter)
        work = locate_split(
            batch, item, items, request, output.num_splits, config, TOKENS
        )
        publish_work(shared, work_state, work, config)
        work_state = work_state.advance()
        if work.num_kv_tiles > 0:
            load_packed_q(shared, q_desc, q_state, work, output.group_size, config)
            q_state = q_state.advance()
            k_state = load_k(shared, batch, k, k_state, work, config)
        item = gl.num_programs(0) + first_lane(fetched)
        if item >= items.end_item:
            items = find_request(
                batch, item, items.scanned_reqs, items.scanned_items, TOKENS
            )
            request = load_request(batch, items.req, PAGED)
    publish_end(shared, work_state, config)
    reset_counter(work_counter)


@gluon.jit
def load_packed_q(
    shared,
    q_desc,
    state,
    work,
    group_size,
    config: gl.constexpr,
):
    """Load the query tile of every consumer warpgroup.

    A box has the tokens of a warpgroup, GROUP heads and 64 columns. Heads past the last one of the
    group are loaded and not stored.
    """
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    TAIL_DIM: gl.constexpr = config.TAIL_DIM
    CONSUMERS: gl.constexpr = config.CONSUMERS
    TOKENS: gl.constexpr = count_tokens(config)
    COLUMN_BOXES: gl.constexpr = HEAD_DIM // BOX_COLUMNS
    STORED: gl.constexpr = shared.q.shape[0]
    boxes = reinterpret(
        shared.q,
        q_desc.dtype,
        [STORED * COLUMN_BOXES, TOKENS, config.GROUP, BOX_COLUMNS],
        q_desc.layout,
    )
    shared.q_pipe.producer_acquire(state)
    full = shared.q_pipe.full_barrier(state)
    head = work.head * group_size
    mbarrier.expect(full, CONSUMERS * WARPGROUP_M * (HEAD_DIM + TAIL_DIM) * 2)
    for consumer in gl.static_range(CONSUMERS):
        tile = state.stage() * CONSUMERS + consumer
        token = work.query_start + consumer * TOKENS
        for j in gl.static_range(COLUMN_BOXES):
            async_load(
                q_desc,
                [token, head, j * BOX_COLUMNS],
                full,
                boxes.index(tile * COLUMN_BOXES + j),
            )
        if TAIL_DIM > 0:
            tails = reinterpret(
                shared.q_tail,
                q_desc.dtype,
                [STORED, TOKENS, config.GROUP, BOX_COLUMNS],
                q_desc.layout,
            )
            async_load(q_desc, [token, head, HEAD_DIM], full, tails.index(tile))
