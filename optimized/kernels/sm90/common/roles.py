"""Roles of the warps of the Hopper kernels: load, compute, finish.

| warps | role |
|---|---|
| 2 or 3 x 4 | `consume_items`: computes and stores WARPGROUP_M rows of each work item |
| 1 | `produce_q_and_k`: takes work items from an atomic counter, loads Q and K by TMA |
| 1 | `produce_v`: loads V by TMA, clears the rows past a sequence's end |

A family adds to them the schedule of its work items and what a consumer does with one of them. If
its work items do not come from the counter, it has a producer of its own, which calls `load_item`.
Source: FlashAttention-3 (Shah et al. 2024) for the roles and the overlap of softmax with products.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import MAX_CONSUMERS, WORK_STAGES
from .gluon_names import warp_specialize
from .load_kv import load_k, load_v
from .load_q import load_q
from .mma import view_kv
from .pipeline import PipelineState, end_ping_pong, start_ping_pong
from .scheduler import (
    fetch_and_increment,
    find_request,
    first_lane,
    load_request,
    reset_counter,
)
from .traits import PRODUCER_REGISTERS, consumer_registers, count_q_stages, count_tokens
from .work_item import NO_WORK, publish_end, publish_work, receive_work


class Loads(NamedTuple):
    """What producer warp 0 loads.

    Args:
        batch: `BatchArgs`.
        q, k: `TmaTensor`.
        group_size: query heads per head of a work item.
    """

    batch: Any
    q: Any
    k: Any
    group_size: Any


class LoadStates(NamedTuple):
    """The `PipelineState` of the next work item, and of its K tiles and query tiles."""

    work: Any
    k: Any
    q: Any


@gluon.jit
def start_loads(config: gl.constexpr):
    """Return the `LoadStates` of the first work item."""
    return LoadStates(
        PipelineState.start(WORK_STAGES),
        PipelineState.start(config.STAGES),
        PipelineState.start(count_q_stages(config)),
    )


@gluon.jit
def load_item(shared, loads, states, work, config: gl.constexpr):
    """Publish a work item, load its Q and K tiles, and return the next `LoadStates`."""
    work_state, k_state, q_state = states
    publish_work(shared, work_state, work, config)
    work_state = work_state.advance()
    if work.num_kv_tiles > 0:
        load_q(shared, loads.q, q_state, work, loads.group_size, config)
        q_state = q_state.advance()
        k_state = load_k(shared, loads.batch, loads.k, k_state, work, config)
    return LoadStates(work_state, k_state, q_state)


@gluon.jit
def produce_q_and_k(
    shared, loads, work_counter, locate: gl.constexpr, config: gl.constexpr
):
    """Run producer warp 0: take work items from the counter, and load their Q and K tiles.

    Args:
        shared: `SharedStorage`.
        loads: `Loads`.
        locate: returns the `WorkItem` with a number, as `locate_work` does.
    """
    TILE_TOKENS: gl.constexpr = config.CONSUMERS * count_tokens(config)
    PAGED: gl.constexpr = config.BLOCK_SIZE > 0
    ROWS: gl.constexpr = config.ROWS_PER_TOKEN
    batch = loads.batch
    states = start_loads(config)
    item = gl.program_id(0)
    zero = gl.to_tensor(0)
    items = find_request(batch, item, zero, zero, TILE_TOKENS, ROWS)
    request = load_request(batch, items.req, PAGED, ROWS)
    while items.req >= 0:
        # fetched now, needed after this item's keys
        fetched = fetch_and_increment(work_counter)
        work = locate(batch, item, items, request, config, TILE_TOKENS)
        states = load_item(shared, loads, states, work, config)
        item = gl.num_programs(0) + first_lane(fetched)
        if item >= items.end_item:
            items = find_request(
                batch, item, items.scanned_reqs, items.scanned_items, TILE_TOKENS, ROWS
            )
            request = load_request(batch, items.req, PAGED, ROWS)
    publish_end(shared, states.work, config)
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
def consume_items(
    shared, args, compute: gl.constexpr, config: gl.constexpr, CONSUMER: gl.constexpr
):
    """Run a consumer warpgroup: compute and store its rows of every published work item.

    Args:
        shared: `SharedStorage`.
        args: arguments of `compute`.
        compute: computes and stores the rows of a work item, and returns the KV state and the query
            state of the next one: (shared, kv, kv_state, q_state, work, args, config, CONSUMER).
            `kv` is for `select_tiles`.
        CONSUMER: index of the warpgroup.
    """
    kv = view_kv(shared, config)
    start_ping_pong(config, CONSUMER)
    work_state = PipelineState.start(WORK_STAGES)
    kv_state = PipelineState.start(config.STAGES)
    q_state = PipelineState.start(count_q_stages(config))
    work = receive_work(shared, work_state, config)
    while work.num_kv_tiles != NO_WORK:
        kv_state, q_state = compute(
            shared, kv, kv_state, q_state, work, args, config, CONSUMER
        )
        work_state = work_state.advance()
        work = receive_work(shared, work_state, config)
    end_ping_pong(config, CONSUMER)


@gluon.jit
def run_roles(
    consume: gl.constexpr,
    output,
    score,
    produce_q_and_k: gl.constexpr,
    producer_args,
    produce_v: gl.constexpr,
    v_args,
    shared,
    config: gl.constexpr,
):
    """Run the consumer warpgroups and the two producer warps of a program.

    Args:
        consume: role of a consumer warpgroup.
        output, score: arguments of the kernel, which say where rows are stored, and `ScoreArgs`.
        produce_q_and_k: role of producer warp 0.
        producer_args: its arguments.
        produce_v: role of producer warp 1, which loads V.
        v_args: its arguments.
        shared: `SharedStorage`.
    """
    N: gl.constexpr = config.CONSUMERS
    REGISTERS: gl.constexpr = consumer_registers(config)
    # three consumers at most: the first entries of the lists are left out if there are two
    UNUSED: gl.constexpr = MAX_CONSUMERS - N
    warp_specialize(
        [
            # the first role runs in the 4 warps of the launch, the others in additional warps
            (consume, (shared, output, score, config, N - 3)),
            (consume, (shared, output, score, config, N - 2)),
            (consume, (shared, output, score, config, N - 1)),
            (produce_q_and_k, producer_args),
            (produce_v, v_args),
        ][UNUSED:],
        [4, 4, 1, 1][UNUSED:],
        [REGISTERS, REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS][UNUSED:],
    )
