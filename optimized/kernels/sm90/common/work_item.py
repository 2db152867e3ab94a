"""Work items of the Hopper prefill kernel, and their broadcast through shared memory.

A work item is a tile of query rows of one request: tokens of one query head, or fewer tokens of all
query heads that share a KV head. Producer warp 0 publishes it for the other warps.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import WARP_SIZE, WARPGROUP_M
from .traits import count_tokens, has_unused_rows, warp_layout

WORK_FIELDS = gl.constexpr(8)
"""Numbers that a `WorkItem` is published as."""
MAX_SEGMENTS = gl.constexpr(256)
"""Segments of a KV head, at most."""
SPANS = gl.constexpr(MAX_SEGMENTS.value**2)
"""Pairs of a first and a last segment."""
NO_WORK = gl.constexpr(-1)
"""Number of KV tiles in the item that ends a program."""
COPY_PTX = gl.constexpr("mov.b32 $0, $1;")
"""PTX that copies a number. What follows from the copy is not computed before it."""


class WorkItem(NamedTuple):
    """A tile of query rows, as the scheduler publishes it.

    Args:
        table_row: row of the block table with the tile's keys: the request. Over a shared prefix
            it is the split, whose row begins within row 0.
        head: the head, of those that `BatchArgs` counts.
        query_start: index of the tile's first query in the batch.
        split: index of the split whose keys the tile attends to; 0 if rows are not split. With
            segments a split is a KV tile, and this is the first one of the segment.
        position: position of the first query in its sequence; negative if the sequence has
            fewer keys than queries. The request has seq_len - position queries from there on.
        seq_len: keys of the request.
        kv_start: row of the request's first key; 0 with a block table.
        num_kv_tiles: KV tiles with keys that are visible to the tile, or NO_WORK.
        span: the head, and the first and the last segment that have KV tiles of the query tile:
            head * SPANS + first * MAX_SEGMENTS + last. 0 without segments. It is one number, also
            with the head, because the main loop has no register to spare.
    """

    table_row: Any
    head: Any
    query_start: Any
    split: Any
    position: Any
    seq_len: Any
    kv_start: Any
    num_kv_tiles: Any
    span: Any = 0


@gluon.jit
def find_token(row, config: gl.constexpr):
    """Return the token of rows of a warpgroup, counted from the warpgroup's first one.

    A quotient that is not a shift would be computed once and kept in registers, which the main
    loops need. So it is computed from a copy wherever it is used.
    """
    if has_unused_rows(config):
        row = gl.inline_asm_elementwise(
            COPY_PTX, "=r,r", [row], dtype=gl.int32, is_pure=False, pack=1
        )
    return row // config.GROUP


@gluon.jit
def find_rows(work, row, config: gl.constexpr):
    """Return the token in the work item, and the query head, of rows of a tile.

    Args:
        row: [WARPGROUP_M] indices of the rows in the work item.

    Returns:
        [WARPGROUP_M]; [WARPGROUP_M], or one number if all rows have the same query head. A row
        without a token has the next warpgroup's first token. With several rows per token, the row
        stands for the token.
    """
    if has_unused_rows(config):
        of_warpgroup = row % WARPGROUP_M
        token = find_token(of_warpgroup, config)
        head = work.head * config.GROUP + (of_warpgroup - token * config.GROUP)
        return row // WARPGROUP_M * count_tokens(config) + token, head
    elif config.GROUP > 1:  # noqa: RET505 (constexpr branches)
        head = work.head * config.GROUP + row % config.GROUP
        return row // config.GROUP, head
    elif config.ROWS_PER_TOKEN > 1:
        return row, (work.query_start + row) % config.ROWS_PER_TOKEN
    else:
        return row, work.head


@gluon.jit
def find_segments(work):
    """Return the first and the last segment that have KV tiles of a work item's query tile."""
    return work.span // MAX_SEGMENTS % MAX_SEGMENTS, work.span % MAX_SEGMENTS


@gluon.jit
def publish_work(shared, state, work, config: gl.constexpr):
    """Write a work item to shared memory for the other warps.

    Each lane writes a copy of its own, and the other warps read the copy of lane 0, the thread
    that also arrives at the barrier. So the writes that are read precede the arrival in program
    order.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [WORK_FIELDS], [WARP_SIZE], [gl.num_warps()], [0]
    )
    head = work.span if config.HAS_SEGMENTS else work.head
    numbers = (
        work.table_row,
        head,
        work.query_start,
        work.split,
        work.position,
        work.seq_len,
        work.kv_start,
        work.num_kv_tiles,
    )
    field = gl.arange(0, WARP_SIZE * WORK_FIELDS, layout) % WORK_FIELDS  # [32 * 8]
    fields = gl.where(field == 0, numbers[0], numbers[WORK_FIELDS - 1])
    for i in gl.static_range(1, WORK_FIELDS - 1):
        fields = gl.where(field == i, numbers[i], fields)
    shared.work_pipe.producer_acquire(state)
    shared.work.index(state.stage()).store(fields)
    shared.work_pipe.producer_commit(state)


@gluon.jit
def publish_end(shared, state, config: gl.constexpr):
    """Publish that no work item is left."""
    publish_work(shared, state, WorkItem(0, 0, 0, 0, 0, 0, 0, NO_WORK), config)


@gluon.jit
def _read_field(shared, stage, FIELD: gl.constexpr):
    layout: gl.constexpr = warp_layout(gl.num_warps())
    return gl.max(shared.work.index(stage).slice(FIELD, 1).load(layout), 0)


@gluon.jit
def receive_work(shared, state, config: gl.constexpr):
    """Wait for the next `WorkItem` and return it."""
    shared.work_pipe.consumer_wait(state)
    stage = state.stage()
    head = _read_field(shared, stage, 1)
    span = 0
    if config.HAS_SEGMENTS:
        span = head
        head = head // SPANS
    work = WorkItem(
        table_row=_read_field(shared, stage, 0),
        head=head,
        query_start=_read_field(shared, stage, 2),
        split=_read_field(shared, stage, 3),
        position=_read_field(shared, stage, 4),
        seq_len=_read_field(shared, stage, 5),
        kv_start=_read_field(shared, stage, 6),
        num_kv_tiles=_read_field(shared, stage, 7),
        span=span,
    )
    shared.work_pipe.consumer_release(state)
    return work
