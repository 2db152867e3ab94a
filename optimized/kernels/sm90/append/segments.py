"""Stream-K partition of the Hopper append kernel: segments, and the work items in them.

The KV tiles of all requests, counted once per query tile, are concatenated and divided into
segments, one per program of a KV head (`common/stream_k.py`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.roles import load_item, start_loads
from ..common.scheduler import load_request
from ..common.stream_k import (
    MIN_TILES,
    add,
    ceil_div,
    choose_length,
    requests_layout,
)
from ..common.tile_range import first_visible_key
from ..common.traits import count_tokens
from ..common.work_item import MAX_SEGMENTS, SPANS, WorkItem, publish_end

REQS_PER_PASS = gl.constexpr(256)
"""Requests whose tiles are counted at once, by every warp for itself."""


class AppendSegment(NamedTuple):
    """A program's share of the concatenated KV tiles of a KV head.

    Args:
        first_req, end_req: requests that have tiles in the segment.
        first_tile: index of the first tile of `first_req`.
        begin, end: indices of the segment's tiles.
        length: tiles per segment.
    """

    first_req: Any
    end_req: Any
    first_tile: Any
    begin: Any
    end: Any
    length: Any


class RequestTiles(NamedTuple):
    """The tiles of one request.

    Args:
        first: index of the first KV tile in the sequence, of those that its rows attend to.
        kv_tiles: KV tiles from there on, at least 1, so that every query tile is in a segment.
        query_tiles: query tiles; 0 if the request has no queries.
    """

    first: Any
    kv_tiles: Any
    query_tiles: Any


@gluon.jit
def count_request_tiles(
    query_len, seq_len, config: gl.constexpr, TILE_TOKENS: gl.constexpr
):
    """Return the `RequestTiles` of one request, or of several.

    Args:
        query_len, seq_len: numbers, or [requests].
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    first = first_visible_key(seq_len - query_len, config) // BLOCK_N
    kv_tiles = gl.maximum(ceil_div(seq_len, BLOCK_N) - first, 1)
    return RequestTiles(first, kv_tiles, ceil_div(query_len, TILE_TOKENS))


@gluon.jit
def _count_tiles(batch, base, config: gl.constexpr, TILE_TOKENS: gl.constexpr):
    """Return the `RequestTiles` of REQS_PER_PASS requests; further ones have no query tiles."""
    req = base + gl.arange(
        0, REQS_PER_PASS, requests_layout(REQS_PER_PASS, gl.num_warps())
    )
    is_req = req < batch.num_reqs
    start = gl.load(batch.query_start_loc + req, mask=is_req, other=0)
    end = gl.load(batch.query_start_loc + req + 1, mask=is_req, other=0)
    seq_len = gl.load(batch.kv_lens + req, mask=is_req, other=0).to(gl.int32)
    query_len = (end - start).to(gl.int32)
    return count_request_tiles(query_len, seq_len, config, TILE_TOKENS)


@gluon.jit
def _count_requests(batch, tiles, base, counted, begin, end):
    """Return the tiles up to the end of a pass, and how many of its requests end by some tiles.

    Args:
        tiles: `RequestTiles` of the requests from `base` on.
        counted: tiles of earlier passes.
        begin, end: bounds of the segment.

    Returns:
        tiles up to the end of the pass; requests that end by `begin`, and before `end`; the end of
        the last request of the former, or 0.
    """
    tiles_of_req = tiles.kv_tiles * tiles.query_tiles
    req = base + gl.arange(
        0, REQS_PER_PASS, requests_layout(REQS_PER_PASS, gl.num_warps())
    )
    is_req = req < batch.num_reqs
    tiles_end = counted + gl.associative_scan(tiles_of_req, 0, add)
    is_before = (tiles_end <= begin) & is_req
    is_within = (tiles_end < end) & is_req
    return (
        counted + gl.sum(tiles_of_req, 0),
        gl.sum(is_before.to(gl.int32), 0),
        gl.sum(is_within.to(gl.int32), 0),
        gl.max(gl.where(is_before, tiles_end, 0), 0),
    )


@gluon.jit
def find_segment(
    batch,
    index,
    num_segments,
    config: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
):
    """Return a program's `AppendSegment`.

    Args:
        batch: `BatchArgs`.
        index, num_segments: of the segment, and how many there are.
    """
    # the tiles of the first pass are counted once: most batches need no other pass
    tiles = _count_tiles(batch, 0, config, TILE_TOKENS)
    total = gl.sum(tiles.kv_tiles * tiles.query_tiles, 0)
    query_tiles = gl.sum(tiles.query_tiles, 0)
    longest = gl.max(gl.where(tiles.query_tiles > 0, tiles.kv_tiles, 0), 0)
    for base in range(REQS_PER_PASS, batch.num_reqs, REQS_PER_PASS):
        more = _count_tiles(batch, base, config, TILE_TOKENS)
        total += gl.sum(more.kv_tiles * more.query_tiles, 0)
        query_tiles += gl.sum(more.query_tiles, 0)
        most = gl.max(gl.where(more.query_tiles > 0, more.kv_tiles, 0), 0)
        longest = gl.maximum(longest, most)
    length = choose_length(total, query_tiles, longest, num_segments, MIN_TILES)
    begin = gl.minimum(index * length, total)
    end = gl.minimum(begin + length, total)
    zero = gl.to_tensor(0)
    found = _count_requests(batch, tiles, 0, zero, begin, end)
    counted = found[0]
    first_req = found[1]
    end_req = found[2]
    first_tile = found[3]
    for base in range(REQS_PER_PASS, batch.num_reqs, REQS_PER_PASS):
        more = _count_tiles(batch, base, config, TILE_TOKENS)
        found = _count_requests(batch, more, base, counted, begin, end)
        counted = found[0]
        first_req += found[1]
        end_req += found[2]
        first_tile = gl.maximum(first_tile, found[3])
    # the request that reaches over the end is in the segment too
    end_req = gl.where(begin < end, end_req + 1, first_req)
    return AppendSegment(first_req, end_req, first_tile, begin, end, length)


@gluon.jit
def locate_item(
    segment,
    req,
    request,
    tiles,
    query_tile,
    tile_index,
    config: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
):
    """Return the `WorkItem` of a query tile in a segment.

    Its KV tiles are those of the segment that the rows of the query tile attend to. `split` is the
    first tile of the segment, in the sequence.

    Args:
        segment: `AppendSegment`.
        req, request, tiles: the request, its `RequestBounds` and its `RequestTiles`.
        query_tile: index of the query tile in the request.
        tile_index: index of the query tile's first KV tile among all tiles.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    first_token = query_tile * TILE_TOKENS
    position = request.seq_len - request.query_len + first_token
    kv_end = request.seq_len
    if config.CAUSAL:
        kv_end = gl.minimum(gl.maximum(position + TILE_TOKENS, 0), request.seq_len)
    in_tile = gl.maximum(segment.begin - tile_index, 0)
    end_in_tile = gl.minimum(segment.end - tile_index, tiles.kv_tiles)
    begin = tiles.first + in_tile
    # of the tiles that these rows attend to
    first = gl.maximum(begin, first_visible_key(position, config) // BLOCK_N)
    end = gl.minimum(tiles.first + end_in_tile, ceil_div(kv_end, BLOCK_N))
    first_segment = tile_index // segment.length
    last_segment = (tile_index + tiles.kv_tiles - 1) // segment.length
    span = first_segment * MAX_SEGMENTS + last_segment
    return WorkItem(
        table_row=req,
        head=gl.program_id(0),
        query_start=request.query_start + first_token,
        split=begin,
        position=position,
        seq_len=request.seq_len,
        kv_start=request.kv_start,
        num_kv_tiles=gl.maximum(end - first, 0),
        span=gl.program_id(0) * SPANS + span,
    )


@gluon.jit
def produce_segment(shared, loads, segment, config: gl.constexpr):
    """Run producer warp 0: publish the work items of a segment, and load their Q and K tiles.

    Args:
        shared: `SharedStorage`.
        loads: `Loads`.
        segment: `AppendSegment`.
    """
    TILE_TOKENS: gl.constexpr = config.CONSUMERS * count_tokens(config)
    states = start_loads(config)
    tile_index = segment.first_tile
    for req in range(segment.first_req, segment.end_req):
        request = load_request(loads.batch, req, True)
        tiles = count_request_tiles(
            request.query_len, request.seq_len, config, TILE_TOKENS
        )
        first = gl.maximum(segment.begin - tile_index, 0) // tiles.kv_tiles
        end = (segment.end - tile_index + tiles.kv_tiles - 1) // tiles.kv_tiles
        end = gl.minimum(end, tiles.query_tiles)
        for query_tile in range(first, end):
            own_index = tile_index + query_tile * tiles.kv_tiles
            work = locate_item(
                segment, req, request, tiles, query_tile, own_index, config, TILE_TOKENS
            )
            states = load_item(shared, loads, states, work, config)
        tile_index += tiles.kv_tiles * tiles.query_tiles
    publish_end(shared, states.work, config)
