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

from .cost_append import choose_segments
from .cost_constants import (
    DECODE_BYTES_PER_US,
    HOPPER_FLOP_PER_US,
    HOPPER_TILE_ROWS,
    L2_BYTES_PER_US,
    LAUNCH_US,
    MAX_SPLIT_TOKENS,
    MIN_SPLIT_KEYS,
    PORTABLE_FLOP_PER_US,
    PORTABLE_PREFILL_US,
    PORTABLE_ROUND_US,
    PREFILL_BYTES_PER_US,
    PREFILL_PROGRAM_BYTES_PER_US,
    PREFILL_US,
    PRODUCTS_ROUND_US,
    RAGGED_SHARE,
    ROUND_US,
    SMALL_HEAD_SHARE,
    SPLIT_US,
    TIE_SHARE,
    WARPGROUP_ROWS,
    WINDOW_ROUND_US,
)
from .cost_layer import Layer, count_long, visible_keys
from .cost_packed import packed_tokens, packs_heads


@dataclass(frozen=True)
class Choice:
    """The kernels of a batch.

    Args:
        path: "decode", "split", "append" or "prefill".
        block_m: rows of a query tile of the portable append kernel on the paths "split" and
            "append", where it takes the calls that Hopper's kernel does not; 0 on the others.
        segments: segments of a KV head, at most, on the path "append". 0 on the others.
    """

    path: str
    block_m: int = 0
    segments: int = 0


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
    if layer.append_rows:
        segments, least = choose_segments(layer, *batch)
        choice = Choice("append", block_m, segments)
    else:
        least = estimate_split(layer, block_m, *batch)
        choice = Choice("split", block_m)
    is_ragged = tokens < num_reqs * max_query_len
    share = RAGGED_SHARE if is_ragged and layer.append_rows else TIE_SHARE
    return choice if least < share * estimate_prefill(layer, *batch) else PREFILL


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
    keys = visible_keys(layer, max_query_len, max_key_len)
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


def estimate_prefill(
    layer: Layer, num_reqs: int, num_long: int, max_query_len: int, max_key_len: int
) -> float:
    """Return the microseconds of a decode launch and a prefill launch.

    A prefill of a whole prompt attends to half of its keys on average.
    """
    processors = layer.processors
    keys = visible_keys(layer, max_query_len, max_key_len)
    if layer.causal:
        keys -= min(keys, max_query_len) // 2
    rows, heads = layer.prefill_rows, layer.kv_heads
    group_size, rate = layer.group_size, PORTABLE_FLOP_PER_US[rows]
    fixed, of_round = PORTABLE_PREFILL_US, PORTABLE_ROUND_US
    of_products = of_window = 0.0
    if layer.has_hopper:
        rows, rate = _hopper_tile(layer)
        fixed, of_round, of_products = PREFILL_US, ROUND_US, PRODUCTS_ROUND_US
        if layer.max_visible_keys is not None:
            of_window = WINDOW_ROUND_US
    if layer.packs_heads and packs_heads(group_size, max_query_len, rows):
        tiles = -(-max_query_len // packed_tokens(group_size, rows))
    elif layer.has_hopper and WARPGROUP_ROWS % group_size:
        # a tile has the rows of one query head
        tiles, heads = -(-max_query_len // rows), heads * group_size
    else:
        tiles = -(-max_query_len * group_size // rows)
    items = num_long * tiles * heads
    # the last round of programs may leave multiprocessors idle
    rounds = -(-items // processors)
    products = 2 * rounds * rows * keys * layer.numbers
    key_bytes, read_once = keys * layer.key_bytes, num_long * layer.kv_heads
    programs = processors if rounds == 1 else items / rounds
    reads_again = (items - read_once) * key_bytes / (L2_BYTES_PER_US * programs)
    reads = read_once * key_bytes / (PREFILL_BYTES_PER_US * programs)
    time = fixed + of_window * rounds
    # the loads of the next work item overlap with the products of the last one
    time += max(
        products / rate + of_round + of_products * (rounds - 1),
        reads + reads_again + of_round,
        # few programs do not reach the bandwidth of the memory
        max(reads, key_bytes / PREFILL_PROGRAM_BYTES_PER_US) + of_round * rounds,
    )
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
