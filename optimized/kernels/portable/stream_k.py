"""Stream-K work partition of decode requests.

The KV tiles of all decode requests are concatenated, request after request, and divided evenly into
segments; each program processes one contiguous segment for one kv head. A request of several query
tiles is counted once per query tile. So a ragged batch is balanced and a single long request fills
the chip. No plan is made on the host: each program counts
the tiles from the lengths itself, which is one load and one sum for a usual batch.

A request inside one segment is stored at once. One that spans several has a partial result in each,
see combine.py.
Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
Multiplication on the GPU", PPoPP 2023.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .options.causal import load_is_causal
from .options.visible_range import visible_range


class Batch(NamedTuple):
    """The requests of a batch.

    Args:
        query_start_loc, seq_lens: see Tensors.
        causal: Optional. CausalFlags.
        num_reqs: number of requests.
        decode_rows: rows of a request, at most, that has tiles.
        prefix: Optional. PrefixPartials, see cascade.py: keys that are not counted.
        columns: query tiles of a request that as many programs compute side by side.
    """

    query_start_loc: Any
    seq_lens: Any
    causal: Any
    num_reqs: Any
    decode_rows: Any
    prefix: Any
    columns: Any


class Segment(NamedTuple):
    """A program's share of the concatenated KV tiles.

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


@triton.jit
def count_tiles(batch, req, is_req, config: tl.constexpr, ALL_KEYS: tl.constexpr):
    """Return the first KV tile of each request, and how many tiles it has.

    A request that is not a decode request has none. A decode request without a visible key has one
    tile, so that some program stores its rows.

    Args:
        batch: Batch.
        req, is_req: indices of requests, and which of them exist.
        ALL_KEYS: whether all keys are counted: trees and ranges add keys to the visible interval.
    """
    start = tl.load(batch.query_start_loc + req, mask=is_req, other=0)
    query_len = tl.load(batch.query_start_loc + req + 1, mask=is_req, other=0) - start
    seq_len = tl.load(batch.seq_lens + req, mask=is_req, other=0)
    if config.BLOCK_SIZE == 0:
        seq_len = tl.load(batch.seq_lens + req + 1, mask=is_req, other=0) - seq_len
    if batch.prefix is not None:
        seq_len = tl.maximum(seq_len - batch.prefix.length, 0)
    is_causal = load_is_causal(batch.causal, req, is_req, config.masks.CAUSAL)
    context = seq_len - query_len
    begin, _ = visible_range(context, seq_len, is_causal, config)
    _, end = visible_range(seq_len - 1, seq_len, is_causal, config)
    if ALL_KEYS:
        begin = begin * 0
        end = seq_len
    first_tile = begin // config.BLOCK_N
    num_tiles = tl.maximum(tl.cdiv(end, config.BLOCK_N) - first_tile, 1)
    num_rows = query_len * config.GROUP_SIZE
    is_decode = (query_len > 0) & (num_rows <= batch.decode_rows)
    return first_tile, tl.where(is_decode, num_tiles, 0)


@triton.jit
def count_query_tiles(batch, req, is_req, config: tl.constexpr):
    """Return how many query tiles each request has, those side by side counted as one."""
    start = tl.load(batch.query_start_loc + req, mask=is_req, other=0)
    query_len = tl.load(batch.query_start_loc + req + 1, mask=is_req, other=0) - start
    return tl.cdiv(query_len * config.GROUP_SIZE, config.BLOCK_M * batch.columns)


@triton.jit
def choose_length(total, num_decodes, longest, num_segments, MIN_TILES: tl.constexpr):
    """Return how many tiles a segment has.

    Requests that all have the same length are cut at their ends, or into equal splits, where that
    makes no segment much longer: each cut costs a combination.

    Args:
        total: tiles of all requests.
        num_decodes: requests that have some, each counted once per query tile.
        longest: KV tiles of the longest request.
        num_segments: segments, at most.
        MIN_TILES: a shorter segment is not worth a combination.
    """
    length = tl.maximum(tl.cdiv(total, num_segments), MIN_TILES)
    per_req = tl.maximum(longest, 1)
    whole_reqs = tl.cdiv(length, per_req) * per_req
    equal_split = tl.cdiv(per_req, tl.maximum(per_req // length, 1))
    even = tl.where(length >= per_req, whole_reqs, equal_split)
    is_even = (longest * num_decodes == total) & (even * 8 <= length * 9)
    # no branch: after one, triton 3.7 no longer knows that keys are contiguous, and loads them two
    # bytes at a time
    return tl.where(is_even, even, length)


@triton.jit
def count_requests(tiles_end, is_req, begin, end):
    """Return how many requests end before a segment begins, and before it ends.

    Args:
        tiles_end, is_req: the end of each request's tiles, and which requests exist.
        begin, end: of the segment.

    Returns:
        The two counts, and the end of the last request of the first.
    """
    is_before = (tiles_end <= begin) & is_req
    is_within = (tiles_end < end) & is_req
    # one sum for two counts
    counts = tl.sum(is_before.to(tl.int32) + is_within.to(tl.int32) * 65536, 0)
    last_end = tl.max(tl.where(is_before, tiles_end, 0), 0)
    return counts % 65536, counts // 65536, last_end


@triton.jit
def make_segment(first_req, end_req, first_tile, begin, end, length):
    """Return a segment, given how many requests end before it begins, and before it ends."""
    # the request that reaches over the end is in the segment too
    end_req = tl.where(begin < end, end_req + 1, first_req)
    return Segment(first_req, end_req, first_tile, begin, end, length)


@triton.jit
def find_segment(
    index, num_segments, batch, config: tl.constexpr, plan: tl.constexpr,
    ALL_KEYS: tl.constexpr,
):  # fmt: skip
    """Return a program's segment.

    Args:
        index, num_segments: of the program, and how many there are.
        batch: Batch.
        plan: StreamK.
        ALL_KEYS: see `count_tiles`.
    """
    lanes = tl.arange(0, plan.REQS_PER_PASS)
    return find_segment_in_lanes(
        index, num_segments, batch, lanes, config, plan, ALL_KEYS
    )


@triton.jit
def find_segment_in_lanes(
    index, num_segments, batch, lanes, config: tl.constexpr, plan: tl.constexpr,
    ALL_KEYS: tl.constexpr,
):  # fmt: skip
    """Return a program's segment, computed in the register layout of `lanes`.

    The other arguments are those of `find_segment`.

    Args:
        lanes: [plan.REQS_PER_PASS] 0, 1, 2 ...
    """
    if plan.MANY_REQS:
        segment = find_segment_of_many(
            index, num_segments, batch, lanes, config, plan, ALL_KEYS
        )
    else:
        segment = find_segment_of_few(
            index, num_segments, batch, lanes, config, plan, ALL_KEYS
        )
    return segment


@triton.jit
def find_segment_of_few(
    index, num_segments, batch, lanes, config: tl.constexpr, plan: tl.constexpr,
    ALL_KEYS: tl.constexpr,
):  # fmt: skip
    """Return a program's segment of a batch of no more than plan.REQS_PER_PASS requests.

    The arguments are those of `find_segment_in_lanes`.
    """
    req = lanes
    is_req = req < batch.num_reqs
    _, tiles = count_tiles(batch, req, is_req, config, ALL_KEYS)
    all_tiles = tiles
    if plan.QUERY_TILES:
        query_tiles = count_query_tiles(batch, req, is_req, config)
        all_tiles = tiles * query_tiles
    tiles_end = tl.cumsum(all_tiles, 0)
    total = tl.max(tiles_end, 0)
    if plan.QUERY_TILES:
        num_decodes = tl.sum(query_tiles, 0)
    else:
        num_decodes = tl.sum((tiles > 0).to(tl.int32), 0)
    longest = tl.max(tiles, 0)
    length = choose_length(total, num_decodes, longest, num_segments, plan.MIN_TILES)
    begin = tl.minimum(index * length, total)
    end = tl.minimum(begin + length, total)
    first_req, end_req, first_tile = count_requests(tiles_end, is_req, begin, end)
    return make_segment(first_req, end_req, first_tile, begin, end, length)


@triton.jit
def find_segment_of_many(
    index, num_segments, batch, lanes, config: tl.constexpr, plan: tl.constexpr,
    ALL_KEYS: tl.constexpr,
):  # fmt: skip
    """Return a program's segment of a batch of any number of requests.

    The tiles are counted in two passes: for the length of a segment, and for its requests.

    The arguments are those of `find_segment_in_lanes`.
    """
    total = 0
    num_decodes = 0
    longest = 0
    for base in range(0, batch.num_reqs, plan.REQS_PER_PASS):
        req = base + lanes
        is_req = req < batch.num_reqs
        _, tiles = count_tiles(batch, req, is_req, config, ALL_KEYS)
        if plan.QUERY_TILES:
            query_tiles = count_query_tiles(batch, req, is_req, config)
            total += tl.sum(tiles * query_tiles, 0)
            num_decodes += tl.sum(query_tiles, 0)
        else:
            total += tl.sum(tiles, 0)
            num_decodes += tl.sum((tiles > 0).to(tl.int32), 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    length = choose_length(total, num_decodes, longest, num_segments, plan.MIN_TILES)
    begin = tl.minimum(index * length, total)
    end = tl.minimum(begin + length, total)
    counted = 0
    first_req = 0
    end_req = 0
    first_tile = 0
    for base in range(0, batch.num_reqs, plan.REQS_PER_PASS):
        req = base + lanes
        is_req = req < batch.num_reqs
        _, tiles = count_tiles(batch, req, is_req, config, ALL_KEYS)
        if plan.QUERY_TILES:
            tiles *= count_query_tiles(batch, req, is_req, config)
        tiles_end = counted + tl.cumsum(tiles, 0)
        counted = tl.max(tiles_end, 0)
        before, within, last_end = count_requests(tiles_end, is_req, begin, end)
        first_req += before
        end_req += within
        first_tile = tl.maximum(first_tile, last_end)
    return make_segment(first_req, end_req, first_tile, begin, end, length)
