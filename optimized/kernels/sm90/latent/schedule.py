"""Stream-K partition of the Hopper latent decode kernel: segments, and the work items in them.

The KV tiles of all requests are concatenated and divided into segments, one per program and row
tile. stream_k.py has the same partition for the portable kernels.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import BLOCK_M, BLOCK_N, REQS_PER_PASS, requests_layout


class LatentBatchArgs(NamedTuple):
    """The batch, as the kernel's arguments describe it.

    Args:
        block_table: [reqs, max_blocks].
        block_table_stride: elements from row to row.
        query_start_loc: [reqs + 1].
        seq_lens: [reqs] keys of each request.
        num_reqs, num_heads: requests and query heads.
    """

    block_table: Any
    block_table_stride: Any
    query_start_loc: Any
    seq_lens: Any
    num_reqs: Any
    num_heads: Any


class LatentSegment(NamedTuple):
    """A program's share of the concatenated KV tiles.

    Args:
        index: index of the segment.
        first_req, end_req: requests that have tiles in the segment.
        first_tile: index of the first tile of `first_req`.
        begin, end: indices of the segment's tiles.
        length: tiles per segment.
    """

    index: Any
    first_req: Any
    end_req: Any
    first_tile: Any
    begin: Any
    end: Any
    length: Any


class LatentItem(NamedTuple):
    """The part of a request that a program computes: a row tile and a range of KV tiles.

    Args:
        req: the request.
        query_start: index of the request's first query in the batch.
        num_rows: rows of the request (queries times heads), minus those of earlier row tiles.
        context: position of the request's first query.
        seq_len: keys of the request.
        num_tiles: KV tiles of the request.
        begin, end: KV tiles of this item, within the request. There are none if the request has
            no rows in the row tile.
        begins_here: 1 if the item has the request's first KV tile, else 0.
    """

    req: Any
    query_start: Any
    num_rows: Any
    context: Any
    seq_len: Any
    num_tiles: Any
    begin: Any
    end: Any
    begins_here: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _ceil_div(a, b):
    return (a + b - 1) // b


@gluon.jit
def _count_tiles(batch, first_req):
    """Return the KV tiles of REQS_PER_PASS requests; 0 for those without queries."""
    req = first_req + gl.arange(0, REQS_PER_PASS, requests_layout(gl.num_warps()))
    is_req = req < batch.num_reqs
    start = gl.load(batch.query_start_loc + req, mask=is_req, other=0)
    end = gl.load(batch.query_start_loc + req + 1, mask=is_req, other=0)
    seq_len = gl.load(batch.seq_lens + req, mask=is_req, other=0).to(gl.int32)
    tiles = gl.maximum(_ceil_div(seq_len, BLOCK_N), 1)
    return gl.where(end > start, tiles, 0)


@gluon.jit
def _choose_length(total, num_active, longest, num_segments, min_tiles):
    """Return how many tiles a segment has. stream_k.py explains `choose_length`."""
    length = gl.maximum(_ceil_div(total, num_segments), min_tiles)
    per_req = gl.maximum(longest, 1)
    whole_reqs = _ceil_div(length, per_req) * per_req
    equal_split = _ceil_div(per_req, gl.maximum(per_req // length, 1))
    even = gl.where(length >= per_req, whole_reqs, equal_split)
    is_even = (longest * num_active == total) & (even * 8 <= length * 9)
    return gl.where(is_even, even, length)


@gluon.jit
def find_latent_segment(batch, index, num_segments, min_tiles):
    """Return a program's `LatentSegment`.

    Args:
        batch: `LatentBatchArgs`.
        index, num_segments: of the segment, and how many there are.
        min_tiles: a shorter segment is not worth a combination.
    """
    total = gl.to_tensor(0)
    num_active = gl.to_tensor(0)
    longest = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        tiles = _count_tiles(batch, base)
        total += gl.sum(tiles, 0)
        num_active += gl.sum((tiles > 0).to(gl.int32), 0)
        longest = gl.maximum(longest, gl.max(tiles, 0))
    length = _choose_length(total, num_active, longest, num_segments, min_tiles)
    begin = gl.minimum(index * length, total)
    end = gl.minimum(begin + length, total)
    counted = gl.to_tensor(0)
    first_req = gl.to_tensor(0)
    end_req = gl.to_tensor(0)
    first_tile = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        tiles = _count_tiles(batch, base)
        req = base + gl.arange(0, REQS_PER_PASS, tiles.type.layout)
        is_req = req < batch.num_reqs
        tiles_end = counted + gl.associative_scan(tiles, 0, _add)
        counted += gl.sum(tiles, 0)
        is_before = (tiles_end <= begin) & is_req
        first_req += gl.sum(is_before.to(gl.int32), 0)
        end_req += gl.sum(((tiles_end < end) & is_req).to(gl.int32), 0)
        first_tile = gl.maximum(
            first_tile, gl.max(gl.where(is_before, tiles_end, 0), 0)
        )
    # the request that reaches over the end is in the segment too
    end_req = gl.where(begin < end, end_req + 1, first_req)
    return LatentSegment(index, first_req, end_req, first_tile, begin, end, length)


@gluon.jit
def locate_latent_item(batch, segment, req, tile_index, row_tile):
    """Return the `LatentItem` of a request in a segment.

    Args:
        req: a request of the segment.
        tile_index: index of its first tile among all tiles.
        row_tile: index of the row tile.
    """
    query_start = gl.load(batch.query_start_loc + req).to(gl.int32)
    query_end = gl.load(batch.query_start_loc + req + 1).to(gl.int32)
    seq_len = gl.load(batch.seq_lens + req).to(gl.int32)
    query_len = query_end - query_start
    num_tiles = gl.where(query_len > 0, gl.maximum(_ceil_div(seq_len, BLOCK_N), 1), 0)
    num_rows = query_len * batch.num_heads - row_tile * BLOCK_M
    begin = gl.maximum(segment.begin - tile_index, 0)
    end = gl.minimum(segment.end - tile_index, num_tiles)
    end = gl.where(num_rows > 0, end, begin)
    return LatentItem(
        req,
        query_start,
        num_rows,
        seq_len - query_len,
        seq_len,
        num_tiles,
        begin,
        end,
        (tile_index >= segment.begin).to(gl.int32),
    )
