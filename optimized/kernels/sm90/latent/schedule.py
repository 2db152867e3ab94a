"""Stream-K partition of the Hopper latent decode kernel: segments, and the work items in them.

A unit is a row tile of a request: up to BLOCK_M of its rows (query tokens times heads), with all KV
tiles of the request. The KV tiles of all units are concatenated, first those of row tile 0 of each
request, and divided into segments, one per program. portable/stream_k.py has the same partition for
the portable kernels.

If all requests have equally many row tiles, each row tile is a partition with segments of its own.
The programs of its segments then read the same KV tiles at the same time as those of the other row
tiles, and most reads are hits in the L2 cache. Other batches are one partition, so that one long
request beside many short ones is computed by nearly all programs.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import (
    BLOCK_M,
    BLOCK_N,
    REQS_PER_PASS,
    REQS_PER_SHORT_PASS,
    requests_layout,
)

MANY = gl.constexpr(2**30)
"""More than any number of row tiles."""


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
        row_tile, req: the unit of the segment's first tile.
        first_tile: index of that unit's first tile. It and the unit have no meaning if the
            segment has no tiles.
        begin, end: indices of the segment's tiles.
        length: tiles per segment.
        partition_index, partition_begin: the first segment and the first tile of the partition,
            which is a row tile or the whole batch.
    """

    index: Any
    row_tile: Any
    req: Any
    first_tile: Any
    begin: Any
    end: Any
    length: Any
    partition_index: Any
    partition_begin: Any


class LatentItem(NamedTuple):
    """The part of a unit that a program computes: a range of KV tiles.

    Args:
        req: the request.
        query_start: index of the request's first query in the batch.
        num_rows: rows of the request (queries times heads), minus those of earlier row tiles.
        context: position of the request's first query.
        seq_len: keys of the request.
        num_tiles: KV tiles of the unit; 0 if the request has no rows in the row tile.
        begin, end: KV tiles of this item, within the request. There are none if the unit has none.
    """

    req: Any
    query_start: Any
    num_rows: Any
    context: Any
    seq_len: Any
    num_tiles: Any
    begin: Any
    end: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _ceil_div(a, b):
    return (a + b - 1) // b


@gluon.jit
def _count_tiles(batch, first_req, row_tile, REQS: gl.constexpr):
    """Return the row tiles of REQS requests, and the KV tiles of their units.

    Args:
        row_tile: of the units. Requests without rows in it have 0 KV tiles.
    """
    req = first_req + gl.arange(0, REQS, requests_layout(REQS, gl.num_warps()))
    is_req = req < batch.num_reqs
    start = gl.load(batch.query_start_loc + req, mask=is_req, other=0)
    end = gl.load(batch.query_start_loc + req + 1, mask=is_req, other=0)
    seq_len = gl.load(batch.seq_lens + req, mask=is_req, other=0).to(gl.int32)
    row_tiles = _ceil_div((end - start).to(gl.int32) * batch.num_heads, BLOCK_M)
    tiles = gl.maximum(_ceil_div(seq_len, BLOCK_N), 1)
    return row_tiles, gl.where(row_tiles > row_tile, tiles, 0)


@gluon.jit
def _measure_row_tile(batch, row_tile):
    """Return the KV tiles of a row tile's units, and the fewest row tiles of their requests."""
    total = gl.to_tensor(0)
    fewest = gl.to_tensor(MANY)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        row_tiles, tiles = _count_tiles(batch, base, row_tile, REQS_PER_PASS)
        total += gl.sum(tiles, 0)
        row_tiles = gl.where(tiles > 0, row_tiles, MANY)
        fewest = gl.minimum(fewest, gl.min(row_tiles, 0))
    return total, fewest


@gluon.jit
def _choose_length(total, num_units, longest, num_segments, min_tiles):
    """Return how many tiles a segment has. portable/stream_k.py explains `choose_length`."""
    length = gl.maximum(_ceil_div(total, num_segments), min_tiles)
    per_unit = gl.maximum(longest, 1)
    whole_units = _ceil_div(length, per_unit) * per_unit
    equal_split = _ceil_div(per_unit, gl.maximum(per_unit // length, 1))
    even = gl.where(length >= per_unit, whole_units, equal_split)
    is_even = (longest * num_units == total) & (even * 8 <= length * 9)
    return gl.where(is_even, even, length)


@gluon.jit
def find_latent_segment(batch, min_tiles):
    """Return the program's `LatentSegment`.

    Args:
        batch: `LatentBatchArgs`.
        min_tiles: a shorter segment is not worth a combination.
    """
    num_segments = gl.num_programs(0)
    num_units = gl.to_tensor(0)
    num_active = gl.to_tensor(0)
    of_first = gl.to_tensor(0)
    most = gl.to_tensor(0)
    longest = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        row_tiles, tiles = _count_tiles(batch, base, 0, REQS_PER_PASS)
        num_units += gl.sum(row_tiles, 0)
        num_active += gl.sum((row_tiles > 0).to(gl.int32), 0)
        of_first += gl.sum(tiles, 0)
        most = gl.maximum(most, gl.max(row_tiles, 0))
        longest = gl.maximum(longest, gl.max(tiles, 0))
    program = gl.program_id(0)
    row_tile = gl.to_tensor(0)
    is_uniform = (num_units == most * num_active) & (most <= num_segments)
    if is_uniform:
        # one partition per row tile; the programs that are left over have no tiles
        partition_segments = num_segments // gl.maximum(most, 1)
        partition_tiles = of_first
        row_tile = program % gl.maximum(most, 1)
        position = program // gl.maximum(most, 1)
        num_units = num_active
    else:
        partition_segments = gl.to_tensor(num_segments)
        partition_tiles = _count_all_tiles(batch)
        position = program
    length = _choose_length(
        partition_tiles, num_units, longest, partition_segments, min_tiles
    )
    partition_index = row_tile * partition_segments
    partition_begin = row_tile * partition_tiles
    index = gl.where(position < partition_segments, partition_index + position, program)
    begin = gl.minimum(position * length, partition_tiles)
    end = gl.minimum(begin + length, partition_tiles)
    end = gl.where(position < partition_segments, end, begin)
    begin += partition_begin
    end += partition_begin
    row_tile_begin = partition_begin
    if (begin < end) & (not is_uniform):
        row_tile, row_tile_begin = _find_row_tile(batch, begin)
    req, first_tile = _find_request(batch, row_tile, begin - row_tile_begin)
    first_tile += row_tile_begin
    return LatentSegment(
        index,
        row_tile,
        req,
        first_tile,
        begin,
        end,
        length,
        partition_index,
        partition_begin,
    )


@gluon.jit
def _count_all_tiles(batch):
    """Return the KV tiles of all units."""
    total = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        row_tiles, tiles = _count_tiles(batch, base, 0, REQS_PER_PASS)
        total += gl.sum(row_tiles * tiles, 0)
    return total


@gluon.jit
def _find_row_tile(batch, tile):
    """Return the row tile of a KV tile, and the index of that row tile's first KV tile."""
    row_tile = gl.to_tensor(0)
    row_tile_begin = gl.to_tensor(0)
    of_row_tile, fewest = _measure_row_tile(batch, row_tile)
    # the row tiles up to the fewest of a request have the same requests, and so the same KV tiles
    alike = of_row_tile * fewest
    while row_tile_begin + alike <= tile:
        row_tile_begin += alike
        row_tile = fewest
        of_row_tile, fewest = _measure_row_tile(batch, row_tile)
        alike = of_row_tile * (fewest - row_tile)
    skipped = (tile - row_tile_begin) // of_row_tile
    return row_tile + skipped, row_tile_begin + skipped * of_row_tile


@gluon.jit
def _find_request(batch, row_tile, tile):
    """Return the request of a tile, and the index of its first tile, among those of a row tile."""
    counted = gl.to_tensor(0)
    found = gl.to_tensor(0)
    first_tile = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        _, tiles = _count_tiles(batch, base, row_tile, REQS_PER_PASS)
        req = base + gl.arange(0, REQS_PER_PASS, tiles.type.layout)
        tiles_end = counted + gl.associative_scan(tiles, 0, _add)
        counted += gl.sum(tiles, 0)
        is_before = (tiles_end <= tile) & (req < batch.num_reqs)
        found += gl.sum(is_before.to(gl.int32), 0)
        first_tile = gl.maximum(
            first_tile, gl.max(gl.where(is_before, tiles_end, 0), 0)
        )
    return found, first_tile


@gluon.jit
def next_unit(batch, req, row_tile, is_last):
    """Return the request and the row tile of the next unit, which may have no KV tiles.

    Args:
        is_last: whether there is none in the segment. Then the result has no meaning.
    """
    req += 1
    if (req == batch.num_reqs) & (not is_last):
        row_tile += 1
        req = _first_request(batch, row_tile)
    return req, row_tile


@gluon.jit
def _first_request(batch, row_tile):
    """Return the first request that has rows in a row tile."""
    found = gl.to_tensor(batch.num_reqs)
    # few at once, because the producer warp has few registers
    for base in range(0, batch.num_reqs, REQS_PER_SHORT_PASS):
        _, tiles = _count_tiles(batch, base, row_tile, REQS_PER_SHORT_PASS)
        req = base + gl.arange(0, REQS_PER_SHORT_PASS, tiles.type.layout)
        found = gl.minimum(found, gl.min(gl.where(tiles > 0, req, found), 0))
    return found


@gluon.jit
def locate_latent_item(batch, req, row_tile, skipped, left):
    """Return the `LatentItem` of a unit in a segment.

    Args:
        req, row_tile: the unit.
        skipped: KV tiles of the unit that are in earlier segments.
        left: KV tiles of this unit and of later ones that are in the segment.
    """
    query_start = gl.load(batch.query_start_loc + req).to(gl.int32)
    query_end = gl.load(batch.query_start_loc + req + 1).to(gl.int32)
    seq_len = gl.load(batch.seq_lens + req).to(gl.int32)
    query_len = query_end - query_start
    num_rows = query_len * batch.num_heads - row_tile * BLOCK_M
    num_tiles = gl.where(num_rows > 0, gl.maximum(_ceil_div(seq_len, BLOCK_N), 1), 0)
    return LatentItem(
        req,
        query_start,
        num_rows,
        seq_len - query_len,
        seq_len,
        num_tiles,
        skipped,
        gl.minimum(skipped + left, num_tiles),
    )
