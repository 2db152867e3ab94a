"""Work items of the Hopper latent decode kernel: the parts of units in a segment, one by one."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.stream_k import ceil_div
from .config import BLOCK_M, BLOCK_N, REQS_PER_SHORT_PASS
from .schedule import count_tiles


class LatentItem(NamedTuple):
    """The part of a unit that a program computes: a range of KV tiles.

    Args:
        req, row_tile: the unit.
        query_start: index of the request's first query in the batch.
        num_rows: rows of the request (queries times heads), minus those of earlier row tiles.
        context: position of the request's first query.
        seq_len: keys of the request.
        num_tiles: KV tiles of the unit; 0 if the request has no rows in the row tile.
        begin, end: KV tiles of this item, within the request. There are none if the unit has none.
    """

    req: Any
    row_tile: Any
    query_start: Any
    num_rows: Any
    context: Any
    seq_len: Any
    num_tiles: Any
    begin: Any
    end: Any


@gluon.jit
def visit_items(batch, segment, visit: gl.constexpr, args, states):
    """Call a role's function with every work item of a segment, and return its last states.

    Args:
        batch: `BatchArgs`.
        segment: `LatentSegment`.
        visit: takes an item with KV tiles, `args` and `states`, and returns the next states.
        args, states: arguments of `visit`: those that stay, and `PipelineState`s.
    """
    req, row_tile = segment.req, segment.row_tile
    skipped, left = segment.skipped, segment.left
    while left > 0:
        item = locate_latent_item(batch, req, row_tile, skipped, left)
        if item.end > item.begin:
            states = visit(item, args, states)
            left -= item.end - item.begin
            skipped = gl.to_tensor(0)
        req, row_tile = next_unit(batch, req, row_tile, left == 0)
    return states


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
        _, tiles = count_tiles(batch, base, row_tile, REQS_PER_SHORT_PASS)
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
    seq_len = gl.load(batch.kv_lens + req).to(gl.int32)
    query_len = query_end - query_start
    num_rows = query_len * batch.num_heads - row_tile * BLOCK_M
    num_tiles = gl.where(num_rows > 0, gl.maximum(ceil_div(seq_len, BLOCK_N), 1), 0)
    return LatentItem(
        req,
        row_tile,
        query_start,
        num_rows,
        seq_len - query_len,
        seq_len,
        num_tiles,
        skipped,
        gl.minimum(skipped + left, num_tiles),
    )
