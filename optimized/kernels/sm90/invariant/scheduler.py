"""Work items of the batch-invariant Hopper kernel: query tiles and splits of their keys.

A work item is a query tile of one KV head and one split of its keys. The last split's item takes
all further splits as well. With one item per query tile, that item has all keys of the tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.scheduler import locate_work
from ..common.tile_range import OwnTiles, first_kv_tile
from ..common.work_item import WorkItem


@gluon.jit
def locate_split(
    batch, item, items, request, config: gl.constexpr, TILE_TOKENS: gl.constexpr
):
    """Return the `WorkItem` with a number.

    Args:
        batch: `BatchArgs`, with one head per KV head and split.
        items, request: of the work item's request.
        TILE_TOKENS: tokens of a query tile.
    """
    num_splits = batch.num_splits
    SPLIT_TILES: gl.constexpr = config.SPLIT_TILES
    work = locate_work(batch, item, items, request, config, TILE_TOKENS)
    split = work.head % num_splits
    first = first_kv_tile(work, config)
    end = first + work.num_kv_tiles
    begin = gl.maximum(first, split * SPLIT_TILES)
    if split < num_splits - 1:
        end = gl.minimum(end, (split + 1) * SPLIT_TILES)
    return WorkItem(
        table_row=work.table_row,
        head=work.head // num_splits,
        query_start=work.query_start,
        split=split,
        position=work.position,
        seq_len=work.seq_len,
        kv_start=work.kv_start,
        num_kv_tiles=gl.maximum(end - begin, 0),
    )


@gluon.jit
def find_split(own, last, config: gl.constexpr):
    """Return the `OwnTiles` of a warpgroup in the split of one of its KV tiles.

    Args:
        own: the warpgroup's `OwnTiles` of all splits.
        last: the tile, the warpgroup's last one in the split.
    """
    SPLIT_TILES: gl.constexpr = config.SPLIT_TILES
    first = gl.maximum(own.first, last // SPLIT_TILES * SPLIT_TILES)
    full_end = gl.minimum(gl.maximum(own.full_end, first), last)
    full_begin = gl.minimum(gl.maximum(own.full_begin, first), full_end)
    return OwnTiles(own.after, last, full_end, full_begin, first, own.before)
