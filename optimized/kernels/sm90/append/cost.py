"""Cost of Hopper's append kernel: its query tiles, its segments, and its estimated time.

The estimate follows the kernel's partition: segments of a KV head, query tiles that are cut by
their bounds, and partial results that are combined one round after the other.
"""

import math
from functools import lru_cache

from ....runtime.cost_constants import (
    L2_BYTES_PER_US,
    MAX_SPLIT_TOKENS,
    MIN_SPLIT_KEYS,
    TIE_SHARE,
)
from ....runtime.cost_layer import BatchBounds, Layer, visible_keys
from ....runtime.family import Estimate
from ....runtime.launcher import next_power_of_2
from ..common.rates import FLOP_PER_US, WARPGROUP_ROWS
from ..common.stream_k import MIN_TILES

APPEND_BYTES_PER_US = 31_000.0
"""Bytes of keys and values that are read: 2 requests of 12 tokens over 100,000 keys take 224 us,
and 48 of 6 over 6,144 take 305."""
APPEND_TILE_US, PROGRAM_BYTES_PER_US = 0.37, 91_000.0
"""A KV tile of Hopper's append kernel in a program that waits for nothing but its own loads: a
fixed time, and its bytes. One request of 8 tokens over 65,536 keys takes 548 us in one segment per
KV head and 169 in four, and 10 of 7 with head size 64 over 12,000 keys take 216 in four."""
APPEND_US, NARROW_APPEND_US = 21.5, 11.0
"""What a launch takes besides what is counted, and one with query tiles of WARPGROUP_ROWS rows: 8
of 4 tokens with a group of 16 over 4,096 keys take 45 us and 32, and 1 of 8 over 2,048 33 and
23."""
APPEND_ITEM_US = 2.6
"""The begin and the end of a query tile in a segment of that kernel: 64 requests of 6 tokens over
1,024 keys have four per segment and take 86 us, or eight and take 101."""
CUT_US = 4.9
"""What it takes if query tiles span several segments, besides the rounds of their combination: one
request of 8 tokens over 2,048 keys takes 38 us in one segment and 36 in two, with half of the
keys."""
COMBINE_US, COMBINED_PARTIALS, COMBINED_ROWS = 0.75, 4, 16
"""A round of a combination, and the partial results and rows in it, for head size 128. One request
of 2 tokens with 16 query heads per KV head over 32,768 keys takes 50 us with 64 partial results,
which have 32 rounds, and 38 with 32."""
FEWER_SEGMENTS_SHARE = 0.98
"""Fewer segments than the chip has programs for are chosen below this share of the time with all:
ragged requests, which the estimate does not know, are divided more evenly by more segments."""
APPEND_WINDOW_US = 7.5
"""What a window adds to Hopper's append kernel: 4 requests of 8 tokens and a window of 1,024 take
40 us, with which 24 take 68, and 10 of 20 tokens and a window of 4,096 take 88."""
RAGGED_SHARE = 1.15
"""Keys of ragged requests are divided up to this share of the time of a prefill. It is
overestimated more, since ragged batches fill its segments evenly: 24 requests of 1 to 43 tokens
over up to 9,493 keys take 200 us, a prefill 315, and the estimates are 393 and 348."""


def choose_append_rows(row_tiles: tuple[int, ...], rows: int) -> int:
    """Return the rows of the smallest query tile that has all rows of a request, or the largest.

    Args:
        row_tiles: rows of each query tile, fewest first.
        rows: rows of the longest request.
    """
    return next((tile for tile in row_tiles if rows <= tile), row_tiles[-1])


def estimate_segments(
    layer: Layer, batch: BatchBounds, row_tiles: tuple[int, ...]
) -> Estimate:
    """Return what the kernel takes for all requests, and the segments of a KV head in that time.

    Args:
        row_tiles: rows of each query tile, fewest first.
    """
    if batch.max_query_len > MAX_SPLIT_TOKENS or batch.max_key_len < MIN_SPLIT_KEYS:
        return Estimate(math.inf)
    segments, time = choose_segments(layer, batch, row_tiles)
    return Estimate(time / (RAGGED_SHARE if batch.is_ragged else TIE_SHARE), segments)


@lru_cache(maxsize=1024)
def choose_segments(
    layer: Layer, batch: BatchBounds, row_tiles: tuple[int, ...]
) -> tuple[int, float]:
    """Return the segments of a KV head with which the kernel is estimated to take least.

    Args:
        row_tiles: rows of each query tile, fewest first.

    Returns:
        the segments, and the microseconds with them.
    """
    tiles, kv_tiles = count_append_tiles(layer, batch, row_tiles)
    most = max(1, layer.processors // layer.kv_heads)
    most = min(most, -(-tiles * kv_tiles // MIN_TILES.value))
    best = most, estimate_append(layer, batch, row_tiles, most)
    if tiles > most:
        return best  # no query tile is in more than two segments
    # the last two cut query tiles evenly, or not at all
    fewer = {most * 3 // 4, most // 2, most // 4, tiles, tiles * (most // tiles)}
    least = FEWER_SEGMENTS_SHARE * best[1]
    for segments in sorted(fewer - {0, most}, reverse=True):
        time = estimate_append(layer, batch, row_tiles, segments)
        if time < least:
            best, least = (segments, time), time
    return best


def count_append_tiles(
    layer: Layer, batch: BatchBounds, row_tiles: tuple[int, ...]
) -> tuple[int, int]:
    """Return the query tiles of all requests, and the KV tiles of each of them, at most."""
    rows = batch.max_query_len * next_power_of_2(layer.group_size)
    tile_rows = choose_append_rows(row_tiles, rows)
    num_long = batch.num_long
    tiles = num_long * -(-rows // tile_rows) + batch.num_reqs - num_long
    keys = visible_keys(layer, batch)
    return tiles, max(1, -(-keys // _tile_keys(layer)))


def estimate_append(
    layer: Layer, batch: BatchBounds, row_tiles: tuple[int, ...], segments: int
) -> float:
    """Return the microseconds of the append kernel of Hopper chips for all requests.

    A program computes the query tiles of its segment one after the other. If there are not more
    query tiles than segments, those of a request are computed at the same time, and the keys are
    read from memory once. Warpgroups without a row compute nothing.

    Args:
        row_tiles: rows of each query tile, fewest first.
        segments: segments of a KV head, at most.
    """
    num_reqs, num_long = batch.num_reqs, batch.num_long
    group, keys_per_tile = next_power_of_2(layer.group_size), _tile_keys(layer)
    rows = batch.max_query_len * group
    is_narrow = choose_append_rows(row_tiles, rows) == WARPGROUP_ROWS
    tiles, kv_tiles = count_append_tiles(layer, batch, row_tiles)
    length = segment_length(tiles, kv_tiles, segments)
    warpgroups = num_long * -(-rows // WARPGROUP_ROWS)
    warpgroups += (num_reqs - num_long) * -(-group // WARPGROUP_ROWS)
    # of a KV tile of one query tile, on average
    products = 2 * warpgroups * WARPGROUP_ROWS * keys_per_tile * layer.numbers / tiles
    bytes_per_tile = keys_per_tile * layer.key_bytes
    # query tiles of a request that are computed at the same time share their reads
    read_once = num_reqs if tiles <= segments else tiles
    reads = read_once / APPEND_BYTES_PER_US + (tiles - read_once) / L2_BYTES_PER_US
    reads *= kv_tiles * layer.kv_heads * bytes_per_tile / layer.processors
    partials = count_partials(tiles, kv_tiles, length)
    # partial results that are combined one after the other
    rounds = -(-partials // COMBINED_PARTIALS)
    rounds *= -(-min(rows, WARPGROUP_ROWS) // COMBINED_ROWS)
    rate = FLOP_PER_US[64 if layer.numbers <= 128 else 128]
    return (
        (NARROW_APPEND_US if is_narrow else APPEND_US)
        + APPEND_ITEM_US * -(-length // kv_tiles)
        + (CUT_US if partials else 0.0)
        + COMBINE_US * rounds * layer.numbers / 256
        + (0.0 if layer.max_visible_keys is None else APPEND_WINDOW_US)
        + max(
            length * products / rate,
            length * (APPEND_TILE_US + bytes_per_tile / PROGRAM_BYTES_PER_US),
            reads,
        )
    )


def segment_length(tiles: int, kv_tiles: int, segments: int) -> int:
    """Return the KV tiles of a segment, as `choose_length` of the append kernels does.

    Args:
        tiles, kv_tiles: query tiles of all requests, and KV tiles of each of them.
        segments: segments of a KV head, at most.

    Example:
        One query tile of 512 KV tiles in 16 segments: 32 each. 24 query tiles of 9: 16 segments
        have 14 each, which is not a multiple of 9.
    """
    length = max(-(-tiles * kv_tiles // segments), MIN_TILES.value)
    if length >= kv_tiles:
        even = -(-length // kv_tiles) * kv_tiles
    else:
        even = -(-kv_tiles // (kv_tiles // length))
    return even if even * 8 <= length * 9 else length


def count_partials(tiles: int, kv_tiles: int, length: int) -> int:
    """Return the partial results of a query tile, at most; 0 if each is in one segment.

    Args:
        tiles, kv_tiles: as in `segment_length`.
        length: KV tiles of a segment.
    """
    if length % kv_tiles == 0 or tiles * kv_tiles <= length:
        return 0
    # a query tile that does not begin a segment has a part of one more
    is_aligned = tiles == 1 or kv_tiles % length == 0
    return -(-kv_tiles // length) + (not is_aligned)


def _tile_keys(layer: Layer) -> int:
    """Return the keys of a KV tile."""
    return 64 if layer.numbers >= 512 else 128
