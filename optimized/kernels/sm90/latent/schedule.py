"""Stream-K partition of the Hopper latent decode kernel: segments.

A unit is a row tile of a request: up to BLOCK_M of its rows (query tokens times heads), with all KV
tiles of the request. The KV tiles of all units are concatenated, first those of row tile 0 of each
request, and divided into segments, one per program (`common/stream_k.py`).

If all requests have equally many row tiles, each row tile is a partition with segments of its own.
The programs of its segments then read the same KV tiles at the same time as those of the other row
tiles, and most reads are hits in the L2 cache. Other batches are one partition, so that one long
request beside many short ones is computed by nearly all programs.

If a row tile has more units than programs, a unit counts as ENDS more KV tiles, at its beginning:
its queries and its output take so long. Otherwise programs with many short units would end last. A
prompt of 2,048 tokens that each attend to all earlier ones, with 128 heads, took 2,205 us on an
H200, of which the KV tiles are about 1,000.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.stream_k import (
    MIN_TILES,
    add,
    ceil_div,
    choose_length,
    requests_layout,
)
from .config import BLOCK_M, BLOCK_N, REQS_PER_PASS

MANY = gl.constexpr(2**30)
"""More than any number of row tiles."""
ENDS = gl.constexpr(2)
"""What the begin and the end of a unit take, in KV tiles."""


class LatentSegment(NamedTuple):
    """A program's share of the concatenated KV tiles.

    Args:
        index: index of the segment.
        row_tile, req: the unit of the segment's first tile. It has no meaning if the segment has no
            tiles.
        skipped: KV tiles of that unit in earlier segments.
        left: KV tiles of the segment.
        length: tiles per segment, what units count besides their own included.
        partition_index: the first segment of the partition, which is a row tile or the whole batch.
    """

    index: Any
    row_tile: Any
    req: Any
    skipped: Any
    left: Any
    length: Any
    partition_index: Any


@gluon.jit
def count_tiles(batch, first_req, row_tile, REQS: gl.constexpr):
    """Return the row tiles of REQS requests, and the KV tiles of their units.

    Args:
        row_tile: of the units. Requests without rows in it have 0 KV tiles.
    """
    req = first_req + gl.arange(0, REQS, requests_layout(REQS, gl.num_warps()))
    is_req = req < batch.num_reqs
    start = gl.load(batch.query_start_loc + req, mask=is_req, other=0)
    end = gl.load(batch.query_start_loc + req + 1, mask=is_req, other=0)
    seq_len = gl.load(batch.kv_lens + req, mask=is_req, other=0).to(gl.int32)
    row_tiles = ceil_div((end - start).to(gl.int32) * batch.num_heads, BLOCK_M)
    tiles = gl.maximum(ceil_div(seq_len, BLOCK_N), 1)
    return row_tiles, gl.where(row_tiles > row_tile, tiles, 0)


@gluon.jit
def _measure_row_tile(batch, row_tile):
    """Return the KV tiles of a row tile's units, and the fewest row tiles of their requests."""
    total = gl.to_tensor(0)
    fewest = gl.to_tensor(MANY)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        row_tiles, tiles = count_tiles(batch, base, row_tile, REQS_PER_PASS)
        total += gl.sum(tiles, 0)
        row_tiles = gl.where(tiles > 0, row_tiles, MANY)
        fewest = gl.minimum(fewest, gl.min(row_tiles, 0))
    return total, fewest


@gluon.jit
def find_latent_segment(batch):
    """Return the program's `LatentSegment`.

    Args:
        batch: `BatchArgs`.
    """
    num_segments = gl.num_programs(0)
    num_units = gl.to_tensor(0)
    num_active = gl.to_tensor(0)
    of_first = gl.to_tensor(0)
    most = gl.to_tensor(0)
    longest = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        row_tiles, tiles = count_tiles(batch, base, 0, REQS_PER_PASS)
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
        ends = gl.where(num_active > partition_segments, ENDS, 0)
        partition_tiles = of_first + num_active * ends
        row_tile = program % gl.maximum(most, 1)
        position = program // gl.maximum(most, 1)
        num_units = num_active
    else:
        partition_segments = gl.to_tensor(num_segments)
        ends = gl.to_tensor(0)
        partition_tiles = _count_all_tiles(batch)
        position = program
    length = choose_length(
        partition_tiles, num_units, longest + ends, partition_segments, MIN_TILES
    )
    partition_index = row_tile * partition_segments
    index = gl.where(position < partition_segments, partition_index + position, program)
    begin = gl.minimum(position * length, partition_tiles)
    end = gl.minimum(begin + length, partition_tiles)
    end = gl.where(position < partition_segments, end, begin)
    left = end - begin
    if (begin < end) & (not is_uniform):
        row_tile, row_tile_begin = _find_row_tile(batch, begin)
        begin -= row_tile_begin
    req, skipped, counted = _find_request(batch, row_tile, begin, ends)
    if ends > 0:
        left -= _find_request(batch, row_tile, end, ends)[2] - counted
    return LatentSegment(index, row_tile, req, skipped, left, length, partition_index)


@gluon.jit
def _count_all_tiles(batch):
    """Return the KV tiles of all units."""
    total = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        row_tiles, tiles = count_tiles(batch, base, 0, REQS_PER_PASS)
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
def _find_request(batch, row_tile, tile, ends):
    """Return the request of a tile among those of a row tile.

    Args:
        ends: tiles that a unit counts before its own.

    Returns:
        The request, its KV tiles before the tile, and what units count besides theirs up to it.
    """
    counted = gl.to_tensor(0)
    found = gl.to_tensor(0)
    first_tile = gl.to_tensor(0)
    units = gl.to_tensor(0)
    for base in range(0, batch.num_reqs, REQS_PER_PASS):
        _, tiles = count_tiles(batch, base, row_tile, REQS_PER_PASS)
        is_unit = tiles > 0
        tiles += gl.where(is_unit, ends, 0)
        req = base + gl.arange(0, REQS_PER_PASS, tiles.type.layout)
        tiles_end = counted + gl.associative_scan(tiles, 0, add)
        counted += gl.sum(tiles, 0)
        is_before = (tiles_end <= tile) & (req < batch.num_reqs)
        found += gl.sum(is_before.to(gl.int32), 0)
        units += gl.sum((is_before & is_unit).to(gl.int32), 0)
        first_tile = gl.maximum(
            first_tile, gl.max(gl.where(is_before, tiles_end, 0), 0)
        )
    passed = tile - first_tile
    return found, gl.maximum(passed - ends, 0), units * ends + gl.minimum(passed, ends)
