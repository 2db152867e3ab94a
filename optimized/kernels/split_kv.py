"""How do programs share a batch of short requests evenly, and join what they cut?

All tiles of keys of all short requests stand in one line, request after request. The line is cut
into spans of equal length, and a program takes one span of one kv head. So a ragged batch is
balanced, a single long row fills the chip, and no plan is made on the host: each program counts the
tiles from the lengths itself, which is one load and one sum for a usual batch.

A request that lies in one span is written at once. One that reaches over several has a part in
each; whoever finishes its part last joins them all, in the order of the keys, so that the result
does not depend on who was last.
"""

import triton
import triton.language as tl

from .rows import fold_parts


@triton.jit
def sight(
    position,
    seq_len,
    is_causal,
    CAUSAL: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    """Return the first key that a query at `position` sees, and the one behind the last."""
    first = position * 0
    end = first + seq_len
    if SLIDING_WINDOW > 0:
        first = tl.maximum(position - SLIDING_WINDOW + 1, 0)
        end = tl.minimum(position + SLIDING_WINDOW, seq_len)
    if CHUNK_SIZE > 0:
        begins = position // CHUNK_SIZE * CHUNK_SIZE
        first = tl.maximum(first, begins)
        end = tl.minimum(end, begins + CHUNK_SIZE)
    if CAUSAL == 1:
        end = tl.minimum(position + 1, seq_len)
    elif CAUSAL == 2:
        end = tl.where(is_causal, tl.minimum(position + 1, end), end)
    return first, end


@triton.jit
def count_tiles(
    req,
    is_req,
    query_start_loc,
    lengths,
    causal,
    causal_stride,
    short_rows,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    WIDENED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the first tile of keys of each request and how many it has; none if not short.

    A short request that sees no key has one tile, whose program writes that.

    Args:
        req, is_req: requests, and which of them there are.
        WIDENED: whether trees or ranges see more than the interval of `sight`.
    """
    start = tl.load(query_start_loc + req, mask=is_req, other=0)
    query_len = tl.load(query_start_loc + req + 1, mask=is_req, other=0) - start
    seq_len = tl.load(lengths + req, mask=is_req, other=0)
    if BLOCK_SIZE == 0:
        seq_len = tl.load(lengths + req + 1, mask=is_req, other=0) - seq_len
    is_causal = True
    if CAUSAL == 2:
        is_causal = tl.load(causal + req * causal_stride, mask=is_req, other=0) != 0
    context = seq_len - query_len
    first, _ = sight(context, seq_len, is_causal, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE)
    _, end = sight(seq_len - 1, seq_len, is_causal, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE)
    if WIDENED:
        first = first * 0
        end = seq_len
    first_tile = first // KEYS
    tiles = tl.maximum(tl.cdiv(end, KEYS) - first_tile, 1)
    is_short = (query_len > 0) & (query_len * GROUP_SIZE <= short_rows)
    return first_tile, tl.where(is_short, tiles, 0)


@triton.jit
def choose_span(total, requests, most, num_spans, MIN_TILES: tl.constexpr):
    """Return how many tiles a span has.

    Requests that are all of one length are cut at their ends, or into equal parts, where that
    makes no span much longer: a cut costs a join.

    Args:
        total: tiles of all requests.
        requests: those that have some.
        most: of one of them.
        num_spans: at most.
        MIN_TILES: a shorter span is not worth a join.
    """
    span = tl.maximum(tl.cdiv(total, num_spans), MIN_TILES)
    longest = tl.maximum(most, 1)
    whole = tl.cdiv(span, longest) * longest
    part = tl.cdiv(longest, tl.maximum(longest // span, 1))
    even = tl.where(span >= longest, whole, part)
    is_even = (most * requests == total) & (even * 8 <= span * 9)
    # no branch: behind one, triton 3.7 no longer sees that keys lie side by side, and loads each
    # element by itself
    return tl.where(is_even, even, span)


@triton.jit
def own_span(
    place,
    num_spans,
    query_start_loc,
    lengths,
    causal,
    causal_stride,
    num_reqs,
    short_rows,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    WIDENED: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
):
    """Return a program's requests and tiles.

    Args:
        WIDTH: requests that are counted at once.
        MANY: whether there are more, which are counted before the span is known.

    Returns:
        first_req, end_req: the requests that lie in the span.
        line: where in the line the first of them begins.
        begin, end: where in the line the span begins and ends.
        span: tiles of a span.
    """
    if MANY:
        # count all tiles, then go through them again
        counted = 0
        requests = 0
        most = 0
        for base in range(0, num_reqs, WIDTH):
            req = base + tl.arange(0, WIDTH)
            _, tiles = count_tiles(
                req, req < num_reqs, query_start_loc, lengths, causal, causal_stride,
                short_rows, GROUP_SIZE, BLOCK_SIZE, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE,
                WIDENED, KEYS,
            )  # fmt: skip
            counted += tl.sum(tiles, 0)
            requests += tl.sum((tiles > 0).to(tl.int32), 0)
            most = tl.maximum(most, tl.max(tiles, 0))
        span = choose_span(counted, requests, most, num_spans, MIN_TILES)
        begin = tl.minimum(place * span, counted)
        end = tl.minimum(begin + span, counted)
        counted = 0
        first_req = 0
        end_req = 0
        line = 0
        for base in range(0, num_reqs, WIDTH):
            req = base + tl.arange(0, WIDTH)
            _, tiles = count_tiles(
                req, req < num_reqs, query_start_loc, lengths, causal, causal_stride,
                short_rows, GROUP_SIZE, BLOCK_SIZE, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE,
                WIDENED, KEYS,
            )  # fmt: skip
            reaches = counted + tl.cumsum(tiles, 0)
            counted = tl.max(reaches, 0)
            before, within, last = _compare(reaches, req < num_reqs, begin, end)
            first_req += before
            end_req += within
            line = tl.maximum(line, last)
    else:
        req = tl.arange(0, WIDTH)
        _, tiles = count_tiles(
            req, req < num_reqs, query_start_loc, lengths, causal, causal_stride,
            short_rows, GROUP_SIZE, BLOCK_SIZE, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE,
            WIDENED, KEYS,
        )  # fmt: skip
        reaches = tl.cumsum(tiles, 0)
        counted = tl.max(reaches, 0)
        requests = tl.sum((tiles > 0).to(tl.int32), 0)
        most = tl.max(tiles, 0)
        span = choose_span(counted, requests, most, num_spans, MIN_TILES)
        begin = tl.minimum(place * span, counted)
        end = tl.minimum(begin + span, counted)
        first_req, end_req, line = _compare(reaches, req < num_reqs, begin, end)
    # the request that reaches over the end lies in the span too
    end_req = tl.where(begin < end, end_req + 1, first_req)
    return first_req, end_req, line, begin, end, span


@triton.jit
def _compare(reaches, is_req, begin, end):
    """Return how many requests end before a span begins, before it ends, and where the former end.

    Args:
        reaches, is_req: where in the line requests end, and which of them there are.
        begin, end: of the span.
    """
    is_before = (reaches <= begin) & is_req
    is_within = (reaches < end) & is_req
    # one sum for two counts
    counts = tl.sum(is_before.to(tl.int32) + is_within.to(tl.int32) * 65536, 0)
    line = tl.max(tl.where(is_before, reaches, 0), 0)
    return counts % 65536, counts // 65536, line


@triton.jit
def part_place(span_place, is_first, kv_head, num_kv_heads, part_rows):
    """Return where a part's first row lies in [spans, 2, kv_heads, part_rows].

    A span holds two parts at most: one of a request that began in an earlier span, and the first
    one of a request that ends in a later one.
    """
    part = (span_place * 2 + is_first) * num_kv_heads + kv_head
    return part.to(tl.int64) * part_rows


@triton.jit
def join_parts(
    total,
    row_sum,
    row_max,
    part_out,
    part_lse,
    first_span,
    last_span,
    kv_head,
    num_kv_heads,
    part_rows,
    row,
    element,
    is_row,
    VALUE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the running sums of a request's rows with its parts of all spans, PARTS at a time."""
    is_value = is_row[:, None] & (element < VALUE_SIZE)[None, :]
    for first in range(first_span, last_span + 1, PARTS):
        span_place = first + tl.arange(0, PARTS)
        is_part = span_place <= last_span
        place = part_place(
            span_place, (span_place == first_span).to(tl.int32), kv_head, num_kv_heads,
            part_rows,
        )  # fmt: skip
        place = place[:, None] + row[None, :]
        # other programs wrote these: not from this one's own cache
        lse = tl.load(
            part_lse + place,
            mask=is_part[:, None] & is_row[None, :],
            other=-float("inf"),
            cache_modifier=".cg",
        )
        value = tl.load(
            part_out + place[:, :, None] * VALUE_SIZE + element[None, None, :],
            mask=is_part[:, None, None] & is_value[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        total, row_sum, row_max = fold_parts(total, row_sum, row_max, value, lse)
    return total, row_sum, row_max
