"""Tile scheduler of the Hopper prefill kernel: work items, the atomic counter, their broadcast.

A work item is a tile of query rows of one request: tokens of one query head, or fewer tokens of all
query heads that share a KV head. Work items are numbered from the batch's last request to its
first, and within a request from its last tokens, which see most keys, to its first. Program i
begins with item i and takes every further one from an atomic counter, so a program that has short
items takes more of them. The result does not depend on which program computes an item.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import WARP_SIZE, count_tokens, has_lower_bound, has_own_tiles, warp_layout

WORK_FIELDS = gl.constexpr(8)
"""Fields of a `WorkItem`."""
NO_WORK = gl.constexpr(-1)
"""Number of KV tiles in the item that ends a program."""
REQS_PER_SCAN = gl.constexpr(32)
"""Requests whose work items are counted together, one per lane."""


class BatchArgs(NamedTuple):
    """The batch, as the kernel's arguments describe it.

    Args:
        block_table: [reqs, max_blocks], or None if the requests' keys are concatenated.
        block_table_stride: elements from row to row.
        query_start_loc: [reqs + 1].
        kv_lens: [reqs] keys of each request; without a block table [reqs + 1], where they start.
        num_reqs, num_heads: requests, and heads that have work items: query heads, or KV heads if
            a tile has the rows of all query heads that share one.
        group_size: such heads per KV head.
        max_decode_rows: a request with at most so many rows (queries times `group_size`) has no
            work items here; the decode kernel computes it.
    """

    block_table: Any
    block_table_stride: Any
    query_start_loc: Any
    kv_lens: Any
    num_reqs: Any
    num_heads: Any
    group_size: Any
    max_decode_rows: Any


class RequestBounds(NamedTuple):
    """One request's queries and keys.

    Args:
        query_start, query_len: index of its first query in the batch, and its number of queries.
        seq_len: its number of keys.
        kv_start: row of its first key; 0 with a block table.
    """

    query_start: Any
    query_len: Any
    seq_len: Any
    kv_start: Any


class ItemRange(NamedTuple):
    """The work items of one request.

    Args:
        req: the request; negative if no work item is left.
        first_item, end_item: its work items i are those with first_item <= i < end_item.
        scanned_reqs: requests that precede the 32 requests with `req`, in the order of the items.
        scanned_items: work items of those.
    """

    req: Any
    first_item: Any
    end_item: Any
    scanned_reqs: Any
    scanned_items: Any


class WorkItem(NamedTuple):
    """A tile of query rows, as the scheduler publishes it.

    Args:
        req, head: the request and the head, of those that `BatchArgs` counts.
        query_start: index of the tile's first query in the batch.
        split: index of the split whose keys the tile attends to; 0 if rows are not split.
        position: position of the first query in its sequence; negative if the sequence has
            fewer keys than queries. The request has seq_len - position queries from there on.
        seq_len: keys of the request.
        kv_start: row of the request's first key; 0 with a block table.
        num_kv_tiles: KV tiles with keys that are visible to the tile, or NO_WORK.
    """

    req: Any
    head: Any
    query_start: Any
    split: Any
    position: Any
    seq_len: Any
    kv_start: Any
    num_kv_tiles: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _count_items(batch, scanned_reqs, TILE_TOKENS: gl.constexpr):
    """Return the work items of the next 32 requests, from the batch's last request on.  # [32]"""
    lane = gl.arange(0, REQS_PER_SCAN, warp_layout(gl.num_warps()))  # [32]
    req = batch.num_reqs - 1 - scanned_reqs - lane
    start = gl.load(batch.query_start_loc + req, mask=req >= 0, other=0)
    end = gl.load(batch.query_start_loc + req + 1, mask=req >= 0, other=0)
    query_len = (end - start).to(gl.int32)
    is_prefill = query_len * batch.group_size > batch.max_decode_rows
    tiles = (query_len + TILE_TOKENS - 1) // TILE_TOKENS
    return gl.where(is_prefill, tiles, 0) * batch.num_heads


@gluon.jit
def find_request(batch, item, scanned_reqs, scanned_items, TILE_TOKENS: gl.constexpr):
    """Return the `ItemRange` of the request that a work item belongs to.

    Args:
        batch: `BatchArgs`.
        item: number of the work item.
        scanned_reqs, scanned_items: of the last `ItemRange`; 0 at first.
        TILE_TOKENS: tokens of a work item.
    """
    counts = _count_items(batch, scanned_reqs, TILE_TOKENS)  # [32]
    total = gl.sum(counts, 0)
    while (item >= scanned_items + total) & (
        scanned_reqs + REQS_PER_SCAN < batch.num_reqs
    ):
        scanned_reqs += REQS_PER_SCAN
        scanned_items += total
        counts = _count_items(batch, scanned_reqs, TILE_TOKENS)
        total = gl.sum(counts, 0)
    ends = scanned_items + gl.associative_scan(counts, 0, _add)  # [32]
    is_before = ends <= item  # [32]
    req = batch.num_reqs - 1 - scanned_reqs - gl.sum(is_before.to(gl.int32), 0)
    first_item = gl.max(gl.where(is_before, ends, scanned_items), 0)
    end_item = gl.min(gl.where(is_before, scanned_items + total, ends), 0)
    req = gl.where(item < scanned_items + total, req, -1)
    return ItemRange(req, first_item, end_item, scanned_reqs, scanned_items)


@gluon.jit
def load_request(batch, req, PAGED: gl.constexpr):
    """Return the `RequestBounds` with this index; zeros if the index is negative."""
    is_req = req >= 0
    start = gl.load(batch.query_start_loc + req, mask=is_req, other=0).to(gl.int32)
    end = gl.load(batch.query_start_loc + req + 1, mask=is_req, other=0).to(gl.int32)
    seq_len = gl.load(batch.kv_lens + req, mask=is_req, other=0).to(gl.int32)
    kv_start = seq_len * 0
    if not PAGED:
        kv_start = seq_len
        kv_end = gl.load(batch.kv_lens + req + 1, mask=is_req, other=0).to(gl.int32)
        seq_len = kv_end - kv_start
    return RequestBounds(start, end - start, seq_len, kv_start)


@gluon.jit
def first_visible_key(position, config: gl.constexpr):
    """Return the first key that a query at `position` attends to.

    Args:
        position: a number, or [rows] of several queries. Negative before the first key.
    """
    begin = position * 0
    if config.WINDOW > 0:
        begin = gl.maximum(begin, position - (config.WINDOW - 1))
    if config.CHUNK_SIZE > 0:
        begin = gl.maximum(begin, position // config.CHUNK_SIZE * config.CHUNK_SIZE)
    return begin


@gluon.jit
def first_kv_tile(work, config: gl.constexpr):
    """Return the index of the first KV tile with a key that a work item attends to."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    tile = first_visible_key(work.position, config) // BLOCK_N
    if config.SPLIT_TILES > 0:
        tile = gl.maximum(tile, work.split * config.SPLIT_TILES)
    return tile


class OwnTiles(NamedTuple):
    """The KV tiles that a warpgroup computes, from the last to the first.

    Args:
        after: KV tiles of the work item after `last`.
        last, first: the last tile and the first one, counted from the sequence's begin.
        full_end, full_begin: tiles i with full_begin <= i < full_end need no mask. Tiles from
            full_end to `last` may need the first mask of `choose_masks`, those from `first` to
            full_begin the second.
        before: KV tiles of the work item before `first`.
    """

    after: Any
    last: Any
    full_end: Any
    full_begin: Any
    first: Any
    before: Any


@gluon.jit
def find_tiles(work, position, config: gl.constexpr):
    """Return the `OwnTiles` of a warpgroup.

    All warpgroups compute all KV tiles of the work item, unless `has_own_tiles`.

    Args:
        work: `WorkItem` with at least one KV tile.
        position: position of the warpgroup's first row.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    # without a mask for any row of the work item
    full_end = work.seq_len // BLOCK_N
    if config.CAUSAL:
        full_end = gl.maximum(work.position + 1, 0) // BLOCK_N
    first = first_kv_tile(work, config)
    last = first + work.num_kv_tiles - 1
    full_begin = first
    after = 0
    before = 0
    # of this warpgroup's own rows
    last_row = position + count_tokens(config) - 1
    if has_own_tiles(config):
        own_last = gl.minimum(gl.maximum(last_row // BLOCK_N, first), last)
        after = last - own_last
        last = own_last
        full_end = gl.maximum(position + 1, 0) // BLOCK_N
    if has_lower_bound(config):
        own_first = gl.minimum(first_visible_key(position, config) // BLOCK_N, last)
        if config.SPLIT_TILES > 0:
            # the window may begin in an earlier split
            own_first = gl.maximum(own_first, first)
        before = own_first - first
        first = own_first
        full_begin = (first_visible_key(last_row, config) + BLOCK_N - 1) // BLOCK_N
        full_begin = gl.minimum(full_begin, last)
        full_end = gl.maximum(full_end, full_begin)
    full_end = gl.minimum(full_end, last)
    return OwnTiles(after, last, full_end, full_begin, first, before)


@gluon.jit
def locate_work(
    batch, item, items, request, config: gl.constexpr, TILE_TOKENS: gl.constexpr
):
    """Return the `WorkItem` with a number, given its request and the request's items."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    number = item - items.first_item
    head = number % batch.num_heads
    tiles_after = number // batch.num_heads
    # a request's last tokens come first
    num_q_tiles = (request.query_len + TILE_TOKENS - 1) // TILE_TOKENS
    first_token = (num_q_tiles - 1 - tiles_after) * TILE_TOKENS
    position = request.seq_len - request.query_len + first_token
    kv_end = request.seq_len
    if config.CAUSAL:
        kv_end = gl.minimum(gl.maximum(position + TILE_TOKENS, 0), request.seq_len)
    num_kv_tiles = (kv_end + BLOCK_N - 1) // BLOCK_N
    if has_lower_bound(config):
        num_kv_tiles -= first_visible_key(position, config) // BLOCK_N
    return WorkItem(
        items.req,
        head,
        request.query_start + first_token,
        0,
        position,
        request.seq_len,
        request.kv_start,
        num_kv_tiles,
    )


@gluon.jit
def find_rows(work, row, config: gl.constexpr):
    """Return the token in the work item, and the query head, of rows of a tile.

    Args:
        row: [WARPGROUP_M] indices of the rows in the work item.

    Returns:
        [WARPGROUP_M]; [WARPGROUP_M], or one number if all rows have the same query head.
    """
    if config.GROUP > 1:
        head = work.head * config.GROUP + row % config.GROUP
        return row // config.GROUP, head
    else:  # noqa: RET505 (a constexpr branch)
        return row, work.head


@gluon.jit
def fetch_and_increment(counter):
    """Add 1 to a counter. Lane 0 of the result has the old value.  # [32]

    The atomic instruction is issued here; its latency is hidden until `first_lane` reads it.
    """
    lane = gl.arange(0, WARP_SIZE, warp_layout(gl.num_warps()))  # [32]
    one = gl.full([WARP_SIZE], 1, gl.int32, warp_layout(gl.num_warps()))
    return gl.atomic_add(counter + lane, one, mask=lane == 0)


@gluon.jit
def first_lane(numbers):
    """Return the first of 32 numbers as a scalar."""
    lane = gl.arange(0, WARP_SIZE, warp_layout(gl.num_warps()))  # [32]
    return gl.sum(gl.where(lane == 0, numbers, 0), 0)


@gluon.jit
def reset_counter(counter):
    """Set the work counter back to 0 when the last program has finished with it.

    Args:
        counter: [2] items that were taken, and programs that found none left.
    """
    finished = first_lane(fetch_and_increment(counter + 1))
    if finished == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def publish_work(shared, state, work):
    """Write a work item to shared memory for the other warps.

    Each lane writes a copy of its own, and the other warps read the copy of lane 0, the thread
    that also arrives at the barrier. So the writes that are read precede the arrival in program
    order.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [WORK_FIELDS], [WARP_SIZE], [gl.num_warps()], [0]
    )
    field = gl.arange(0, WARP_SIZE * WORK_FIELDS, layout) % WORK_FIELDS  # [32 * 8]
    fields = gl.where(field == 0, work[0], work[WORK_FIELDS - 1])
    for i in gl.static_range(1, WORK_FIELDS - 1):
        fields = gl.where(field == i, work[i], fields)
    shared.work_pipe.producer_acquire(state)
    shared.work.index(state.stage()).store(fields)
    shared.work_pipe.producer_commit(state)


@gluon.jit
def publish_end(shared, state):
    """Publish that no work item is left."""
    publish_work(shared, state, WorkItem(0, 0, 0, 0, 0, 0, 0, NO_WORK))


@gluon.jit
def _read_field(shared, stage, FIELD: gl.constexpr):
    layout: gl.constexpr = warp_layout(gl.num_warps())
    return gl.max(shared.work.index(stage).slice(FIELD, 1).load(layout), 0)


@gluon.jit
def receive_work(shared, state):
    """Wait for the next `WorkItem` and return it."""
    shared.work_pipe.consumer_wait(state)
    stage = state.stage()
    work = WorkItem(
        _read_field(shared, stage, 0),
        _read_field(shared, stage, 1),
        _read_field(shared, stage, 2),
        _read_field(shared, stage, 3),
        _read_field(shared, stage, 4),
        _read_field(shared, stage, 5),
        _read_field(shared, stage, 6),
        _read_field(shared, stage, 7),
    )
    shared.work_pipe.consumer_release(state)
    return work
