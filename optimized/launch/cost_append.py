"""Cost of Hopper's append kernel: its query tiles, its segments, and its estimated time.

The estimate follows the kernel's partition: segments of a KV head, query tiles that are cut by
their bounds, and partial results that are combined one round after the other.
"""

from .cost_constants import (
    APPEND_BYTES_PER_US,
    APPEND_ITEM_US,
    APPEND_TILE_US,
    APPEND_US,
    APPEND_WINDOW_US,
    COMBINE_US,
    COMBINED_PARTIALS,
    COMBINED_ROWS,
    CUT_US,
    FEWER_SEGMENTS_SHARE,
    HOPPER_FLOP_PER_US,
    L2_BYTES_PER_US,
    MIN_SEGMENT_TILES,
    NARROW_APPEND_US,
    PROGRAM_BYTES_PER_US,
    WARPGROUP_ROWS,
)
from .cost_layer import Layer, visible_keys
from .launcher import next_power_of_2


def choose_append_rows(row_tiles: tuple[int, ...], rows: int) -> int:
    """Return the rows of the smallest query tile that has all rows of a request, or the largest.

    Args:
        row_tiles: rows of each query tile, fewest first.
        rows: rows of the longest request.
    """
    return next((each for each in row_tiles if rows <= each), row_tiles[-1])


def choose_segments(
    layer: Layer, num_reqs: int, num_long: int, max_query_len: int, max_key_len: int
) -> tuple[int, float]:
    """Return the segments of a KV head with which the kernel is estimated to take least.

    Returns:
        the segments, and the microseconds with them.
    """
    batch = (num_reqs, num_long, max_query_len, max_key_len)
    tiles, kv_tiles = count_append_tiles(layer, *batch)
    most = max(1, layer.processors // layer.kv_heads)
    most = min(most, -(-tiles * kv_tiles // MIN_SEGMENT_TILES))
    best = most, estimate_append(layer, *batch, most)
    if tiles > most:
        return best  # no query tile is in more than two segments
    # the last two cut query tiles evenly, or not at all
    fewer = {most * 3 // 4, most // 2, most // 4, tiles, tiles * (most // tiles)}
    least = FEWER_SEGMENTS_SHARE * best[1]
    for segments in sorted(fewer - {0, most}, reverse=True):
        time = estimate_append(layer, *batch, segments)
        if time < least:
            best, least = (segments, time), time
    return best


def count_append_tiles(
    layer: Layer, num_reqs: int, num_long: int, max_query_len: int, max_key_len: int
) -> tuple[int, int]:
    """Return the query tiles of all requests, and the KV tiles of each of them, at most."""
    rows = max_query_len * next_power_of_2(layer.group_size)
    tile_rows = choose_append_rows(layer.append_rows, rows)
    tiles = num_long * -(-rows // tile_rows) + num_reqs - num_long
    keys = visible_keys(layer, max_query_len, max_key_len)
    return tiles, max(1, -(-keys // _tile_keys(layer)))


def estimate_append(
    layer: Layer,
    num_reqs: int,
    num_long: int,
    max_query_len: int,
    max_key_len: int,
    segments: int,
) -> float:
    """Return the microseconds of the append kernel of Hopper chips for all requests.

    A program computes the query tiles of its segment one after the other. If there are not more
    query tiles than segments, those of a request are computed at the same time, and the keys are
    read from memory once. Warpgroups without a row compute nothing.

    Args:
        segments: segments of a KV head, at most.
    """
    batch = (num_reqs, num_long, max_query_len, max_key_len)
    group, keys_per_tile = next_power_of_2(layer.group_size), _tile_keys(layer)
    rows = max_query_len * group
    is_narrow = choose_append_rows(layer.append_rows, rows) == WARPGROUP_ROWS
    tiles, kv_tiles = count_append_tiles(layer, *batch)
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
    rate = HOPPER_FLOP_PER_US[64 if layer.numbers <= 128 else 128]
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
    length = max(-(-tiles * kv_tiles // segments), MIN_SEGMENT_TILES)
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
