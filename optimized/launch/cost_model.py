"""Cost model: which kernels compute the requests of a batch that are too long for a decode tile.

Four paths exist. **decode**: every request fits one decode tile, so there is nothing to choose.
**split**: one launch of the append kernel computes every request, short ones included, and divides
their KV tiles evenly among the multiprocessors. **append** does the same with the append kernel of
Hopper chips. **prefill**: the decode kernel computes the short
requests, and a prefill kernel has one program per query tile of the long ones. That kernel reads no
key twice, but few query tiles leave most of the chip idle.

The model compares estimates in microseconds. A launch takes the longest of its products, its reads
of memory and its reads of the L2 cache, plus a constant. The host knows bounds only: the number of
requests and tokens, and the longest request. As many requests as possible are assumed to be as long
as the longest one, and the others to have one new token. The constants are in cost_constants.py.
"""

from dataclasses import dataclass
from functools import lru_cache

from .cost_constants import (
    APPEND_US,
    APPEND_WINDOW_US,
    COMBINE_US,
    COMBINED_PARTIALS,
    COMBINED_ROWS,
    DECODE_BYTES_PER_US,
    HOPPER_FLOP_PER_US,
    HOPPER_TILE_ROWS,
    L2_BYTES_PER_US,
    LAUNCH_US,
    MAX_SPLIT_TOKENS,
    MIN_SEGMENT_TILES,
    MIN_SPLIT_KEYS,
    PORTABLE_FLOP_PER_US,
    PREFILL_BYTES_PER_US,
    PREFILL_US,
    PROGRAM_BYTES_PER_US,
    ROUND_US,
    SMALL_HEAD_SHARE,
    SPLIT_US,
    TIE_SHARE,
    WARPGROUP_ROWS,
    WIDE_HEAD_SHARE,
)
from .launcher import next_power_of_2


@dataclass(frozen=True)
class Layer:
    """What the estimates need to know of all calls with one signature.

    Args:
        group_size, kv_heads: query heads per kv head, and kv heads.
        numbers: elements of a key and a value of one head.
        key_bytes: bytes of a key and a value of one head.
        short_rows: rows of a request, at most, that fits a decode tile; 0 without a decode kernel.
        row_tiles: rows of each tile of the append kernel, fewest first.
        prefill_rows: rows of a tile of the portable prefill kernel.
        has_hopper: whether the prefill kernel of Hopper chips takes the calls.
        has_append: whether the append kernel of Hopper chips takes the calls.
        causal: whether queries attend to no later keys.
        max_visible_keys: Optional. Keys that a row attends to, at most. If None, all of them.
        processors: multiprocessors of the chip.
        converted_bytes: bytes per key of one head that are read and written before that prefill
            kernel, which takes no FP8 cache; 0 without a conversion.
    """

    group_size: int
    kv_heads: int
    numbers: int
    key_bytes: int
    short_rows: int
    row_tiles: tuple[int, ...]
    prefill_rows: int
    has_hopper: bool
    causal: bool
    max_visible_keys: int | None
    processors: int
    converted_bytes: int = 0
    has_append: bool = False


@dataclass(frozen=True)
class Choice:
    """The kernels of a batch.

    Args:
        path: "decode", "split", "append" or "prefill".
        block_m: rows of a query tile of the portable append kernel on the paths "split" and
            "append", where it takes the calls that Hopper's kernel does not; 0 on the others.
    """

    path: str
    block_m: int = 0


DECODE, PREFILL = Choice("decode"), Choice("prefill")


def choose_path(
    layer: Layer, num_reqs: int, tokens: int, max_query_len: int, max_key_len: int
) -> Choice:
    """Return the kernels that are estimated to take the least time.

    Args:
        layer: what the calls of a signature have in common.
        num_reqs, tokens: requests, and new tokens of all of them.
        max_query_len, max_key_len: upper bounds over the requests.
    """
    if layer.short_rows and max_query_len * layer.group_size <= layer.short_rows:
        return DECODE
    if max_query_len > MAX_SPLIT_TOKENS or max_key_len < MIN_SPLIT_KEYS:
        return PREFILL
    return _choose_long(layer, num_reqs, tokens, max_query_len, max_key_len)


@lru_cache(maxsize=1024)
def _choose_long(
    layer: Layer, num_reqs: int, tokens: int, max_query_len: int, max_key_len: int
) -> Choice:
    """Return the choice for a batch whose longest request does not fit a decode tile."""
    num_long = count_long(num_reqs, tokens, max_query_len)
    batch = (num_reqs, num_long, max_query_len, max_key_len)
    block_m = choose_row_tile(layer, num_reqs, tokens, max_query_len, max_key_len)
    if layer.has_append:
        path, least = "append", estimate_append(layer, *batch)
    else:
        path, least = "split", estimate_split(layer, block_m, *batch)
    prefill = TIE_SHARE * estimate_prefill(layer, *batch)
    return Choice(path, block_m) if least < prefill else PREFILL


@lru_cache(maxsize=1024)
def choose_row_tile(
    layer: Layer, num_reqs: int, tokens: int, max_query_len: int, max_key_len: int
) -> int:
    """Return the rows of the query tiles with which a split is estimated to take least."""
    num_long = count_long(num_reqs, tokens, max_query_len)
    batch = (num_reqs, num_long, max_query_len, max_key_len)
    return min(
        layer.row_tiles, key=lambda block_m: estimate_split(layer, block_m, *batch)
    )


def count_long(num_reqs: int, tokens: int, max_query_len: int) -> int:
    """Return how many requests are as long as the longest one, if the others have one token.

    Example:
        4 requests of 9 tokens, at most 3 each: 2 * 3 + 2 * 1 is 8, so the third is assumed long.
    """
    spare = tokens - num_reqs
    return max(1, min(num_reqs, -(-spare // max(1, max_query_len - 1))))


def estimate_split(
    layer: Layer,
    block_m: int,
    num_reqs: int,
    num_long: int,
    max_query_len: int,
    max_key_len: int,
) -> float:
    """Return the microseconds of the append kernel for all requests, with tiles of `block_m` rows.

    Every query tile is counted with the keys of its request, because the slowest program counts.
    """
    rows = max_query_len * layer.group_size
    tiles = num_long * -(-rows // block_m)
    tiles += (num_reqs - num_long) * -(-layer.group_size // block_m)
    keys = _visible_keys(layer, max_query_len, max_key_len)
    heads = layer.kv_heads
    products = 2 * tiles * heads * block_m * keys * layer.numbers
    reads = num_reqs * heads * keys * layer.key_bytes
    reads_again = (tiles - num_reqs) * heads * keys * layer.key_bytes
    processors = layer.processors
    rate = PORTABLE_FLOP_PER_US[block_m] * processors
    if layer.numbers <= 128:
        rate *= SMALL_HEAD_SHARE
    return SPLIT_US + max(
        products / rate,
        reads / (DECODE_BYTES_PER_US * processors)
        + reads_again / (L2_BYTES_PER_US * processors),
    )


def estimate_append(
    layer: Layer, num_reqs: int, num_long: int, max_query_len: int, max_key_len: int
) -> float:
    """Return the microseconds of the append kernel of Hopper chips for all requests.

    A program computes the query tiles of its segment one after the other. If there are fewer query
    tiles than segments, those of a request are computed at the same time, and the keys are read
    from memory once. Warpgroups without a row compute nothing.
    """
    group = next_power_of_2(layer.group_size)
    tile_rows, rate = _hopper_tile(layer)
    rows, keys_per_tile = max_query_len * group, _hopper_tile_keys(layer)
    tiles = num_long * -(-rows // tile_rows) + num_reqs - num_long
    kv_tiles = -(-_visible_keys(layer, max_query_len, max_key_len) // keys_per_tile)
    segments = max(1, layer.processors // layer.kv_heads)
    length = segment_length(tiles, kv_tiles, segments)
    warpgroups = num_long * -(-rows // WARPGROUP_ROWS)
    warpgroups += (num_reqs - num_long) * -(-group // WARPGROUP_ROWS)
    # of a KV tile of one query tile, on average
    products = 2 * warpgroups * WARPGROUP_ROWS * keys_per_tile * layer.numbers / tiles
    bytes_per_tile = keys_per_tile * layer.key_bytes
    readers = num_reqs if tiles < segments else tiles
    reads = readers * kv_tiles * layer.kv_heads * bytes_per_tile
    bandwidth = DECODE_BYTES_PER_US * layer.processors
    if layer.numbers >= 512:
        bandwidth *= WIDE_HEAD_SHARE
    # partial results that are combined one after the other
    rounds = -(-count_partials(tiles, kv_tiles, length) // COMBINED_PARTIALS)
    rounds *= -(-min(rows, WARPGROUP_ROWS) // COMBINED_ROWS)
    return (
        APPEND_US
        + COMBINE_US * rounds * layer.numbers / 256
        + (0.0 if layer.max_visible_keys is None else APPEND_WINDOW_US)
        + max(
            length * products / rate,
            length * bytes_per_tile / PROGRAM_BYTES_PER_US,
            reads / bandwidth,
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


def estimate_prefill(
    layer: Layer, num_reqs: int, num_long: int, max_query_len: int, max_key_len: int
) -> float:
    """Return the microseconds of a decode launch and a prefill launch.

    A prefill of a whole prompt attends to half of its keys on average.
    """
    processors = layer.processors
    keys = _visible_keys(layer, max_query_len, max_key_len)
    if layer.causal:
        keys -= min(keys, max_query_len) // 2
    rows, heads = layer.prefill_rows, layer.kv_heads
    rows_per_token, rate = layer.group_size, PORTABLE_FLOP_PER_US[rows]
    if layer.has_hopper:
        rows, rate = _hopper_tile(layer)
        if WARPGROUP_ROWS % layer.group_size:
            # a tile has the rows of one query head
            heads, rows_per_token = heads * layer.group_size, 1
    items = num_long * -(-max_query_len * rows_per_token // rows) * heads
    # the last round of programs may leave multiprocessors idle
    rounds = -(-items // processors)
    products = 2 * rounds * rows * keys * layer.numbers
    read_once = num_long * layer.kv_heads
    reads = (
        read_once / PREFILL_BYTES_PER_US + (items - read_once) / L2_BYTES_PER_US
    ) * (keys * layer.key_bytes / (processors if rounds == 1 else items / rounds))
    # few programs do not reach the bandwidth of the memory
    reads = max(reads, rounds * keys * layer.key_bytes / PROGRAM_BYTES_PER_US)
    # the loads of the next work item overlap with the products of the last one
    time = PREFILL_US + max(products / rate + ROUND_US, reads + ROUND_US * rounds)
    if layer.converted_bytes:
        converted = num_long * layer.kv_heads * max_key_len * layer.converted_bytes
        time += LAUNCH_US + converted / (DECODE_BYTES_PER_US * processors)
    if layer.short_rows:
        reads = (num_reqs - num_long) * layer.kv_heads * max_key_len * layer.key_bytes
        time += reads / (DECODE_BYTES_PER_US * processors)
    return time


def _hopper_tile(layer: Layer) -> tuple[int, float]:
    """Return the rows of a query tile of Hopper's kernels, and their operations per microsecond."""
    size = 64 if layer.numbers <= 128 else 128
    return HOPPER_TILE_ROWS[size], HOPPER_FLOP_PER_US[size]


def _hopper_tile_keys(layer: Layer) -> int:
    """Return the keys of a KV tile of Hopper's append kernel."""
    return 64 if layer.numbers >= 512 else 128


def _visible_keys(layer: Layer, max_query_len: int, max_key_len: int) -> int:
    """Return the keys that the rows of one request attend to, at most."""
    if layer.max_visible_keys is None:
        return max_key_len
    return min(max_key_len, layer.max_visible_keys + max_query_len)
