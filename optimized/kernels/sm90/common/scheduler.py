"""Tile scheduler of the Hopper kernels: the order of work items, and the atomic counter.

Work items are numbered from the batch's last request to its first, and within a request from its
last tokens, which see most keys, to its first. Program i begins with item i and takes every further
one from an atomic counter, so a program that has short items takes more of them. The result does
not depend on which program computes an item.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import WARP_SIZE
from .stream_k import add
from .tile_range import end_of_visible_keys, first_visible_key
from .traits import has_lower_bound, has_upper_bound, warp_layout
from .work_item import WorkItem

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
        num_splits: work items that share a query tile, of which each is a head of `num_heads`.
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
    num_splits: Any = 1


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


@gluon.jit
def _count_items(
    batch, scanned_reqs, TILE_TOKENS: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr
):
    """Return the work items of the next 32 requests, from the batch's last request on.  # [32]"""
    lane = gl.arange(0, REQS_PER_SCAN, warp_layout(gl.num_warps()))  # [32]
    req = batch.num_reqs - 1 - scanned_reqs - lane
    start = gl.load(batch.query_start_loc + req, mask=req >= 0, other=0)
    end = gl.load(batch.query_start_loc + req + 1, mask=req >= 0, other=0)
    query_len = (end - start).to(gl.int32) * ROWS_PER_TOKEN
    is_prefill = query_len * batch.group_size > batch.max_decode_rows
    tiles = (query_len + TILE_TOKENS - 1) // TILE_TOKENS
    return gl.where(is_prefill, tiles, 0) * batch.num_heads


@gluon.jit
def find_request(
    batch, item, scanned_reqs, scanned_items,
    TILE_TOKENS: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr = 1,
):  # fmt: skip
    """Return the `ItemRange` of the request that a work item belongs to.

    Args:
        batch: `BatchArgs`.
        item: number of the work item.
        scanned_reqs, scanned_items: of the last `ItemRange`; 0 at first.
        TILE_TOKENS: tokens of a work item, or its rows if there are several per token.
        ROWS_PER_TOKEN: that of `Sm90Config`.
    """
    counts = _count_items(batch, scanned_reqs, TILE_TOKENS, ROWS_PER_TOKEN)  # [32]
    total = gl.sum(counts, 0)
    while (item >= scanned_items + total) & (
        scanned_reqs + REQS_PER_SCAN < batch.num_reqs
    ):
        scanned_reqs += REQS_PER_SCAN
        scanned_items += total
        counts = _count_items(batch, scanned_reqs, TILE_TOKENS, ROWS_PER_TOKEN)
        total = gl.sum(counts, 0)
    ends = scanned_items + gl.associative_scan(counts, 0, add)  # [32]
    is_before = ends <= item  # [32]
    req = batch.num_reqs - 1 - scanned_reqs - gl.sum(is_before.to(gl.int32), 0)
    first_item = gl.max(gl.where(is_before, ends, scanned_items), 0)
    end_item = gl.min(gl.where(is_before, scanned_items + total, ends), 0)
    req = gl.where(item < scanned_items + total, req, -1)
    return ItemRange(req, first_item, end_item, scanned_reqs, scanned_items)


@gluon.jit
def load_request(batch, req, PAGED: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr = 1):
    """Return the `RequestBounds` with this index; zeros if the index is negative.

    With several rows per token, its queries are counted in rows.
    """
    is_req = req >= 0
    start = gl.load(batch.query_start_loc + req, mask=is_req, other=0).to(gl.int32)
    end = gl.load(batch.query_start_loc + req + 1, mask=is_req, other=0).to(gl.int32)
    seq_len = gl.load(batch.kv_lens + req, mask=is_req, other=0).to(gl.int32)
    kv_start = seq_len * 0
    if not PAGED:
        kv_start = seq_len
        kv_end = gl.load(batch.kv_lens + req + 1, mask=is_req, other=0).to(gl.int32)
        seq_len = kv_end - kv_start
    start *= ROWS_PER_TOKEN
    return RequestBounds(start, end * ROWS_PER_TOKEN - start, seq_len, kv_start)


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
    position = request.seq_len * config.ROWS_PER_TOKEN - request.query_len + first_token
    kv_end = request.seq_len
    if has_upper_bound(config):
        kv_end = end_of_visible_keys(position + TILE_TOKENS - 1, config)
        kv_end = gl.minimum(gl.maximum(kv_end, 0), request.seq_len)
    num_kv_tiles = (kv_end + BLOCK_N - 1) // BLOCK_N
    if has_lower_bound(config):
        num_kv_tiles -= first_visible_key(position, config) // BLOCK_N
    return WorkItem(
        table_row=items.req,
        head=head,
        query_start=request.query_start + first_token,
        split=0,
        position=position,
        seq_len=request.seq_len,
        kv_start=request.kv_start,
        num_kv_tiles=num_kv_tiles,
    )


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
