"""What can be left out of the loop?

All tiles of a row but its last one are full: their keys need no mask, neither when they are
loaded nor when they are compared. So the loop runs twice, over full tiles without masks and then
over the one that may not be full. And the chip computes powers of two, not of e: scores are
measured in units of log2(e), which is one factor in the scale, and each exponential loses a
multiplication.
"""

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl

from . import decode_6_balanced
from .decode_6_balanced import join_if_last, write_part

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_reqs"])
def edges_kernel(
    query,  # [reqs, QUERY_HEADS, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    value_cache,
    block_table,  # [reqs, table_width]
    seq_lens,
    out,
    part_total,  # [spans, 2, QUERY_HEADS, HEAD_SIZE] float32
    part_sum,  # [spans, 2, QUERY_HEADS] float32
    part_max,
    arrived,  # [reqs, KV_HEADS] zeros
    num_reqs,
    table_width,
    scale,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_REQS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head = tl.program_id(0) % KV_HEADS
    span = tl.program_id(0) // KV_HEADS
    # step: find this program's span of all tiles
    index = tl.arange(0, MAX_REQS)
    tiles = tl.load(seq_lens + index, mask=index < num_reqs, other=0)
    tiles = tl.cdiv(tiles, KEYS)
    num_tiles = tl.sum(tiles, 0)
    num_spans = tl.minimum(tl.num_programs(0) // KV_HEADS, num_tiles)
    if span >= num_spans:
        return
    begin = span * num_tiles // num_spans
    end = (span + 1) * num_tiles // num_spans
    req_ends = tl.cumsum(tiles, 0)
    first_req = tl.sum((req_ends <= begin).to(tl.int32), 0)
    last_req = tl.sum((req_ends < end).to(tl.int32), 0)
    req_begin = tl.sum(tl.where(index < first_req, tiles, 0), 0)

    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = (row < group)[:, None]
    for req in range(first_req, last_req + 1):
        # step: take this span's share of the request's keys
        seq_len = tl.load(seq_lens + req)
        req_end = req_begin + tl.cdiv(seq_len, KEYS)
        first_key = (tl.maximum(begin, req_begin) - req_begin) * KEYS
        end_key = tl.minimum((end - req_begin) * KEYS, seq_len)
        full_end = end_key // KEYS * KEYS
        head = req * QUERY_HEADS + kv_head * group + row
        asked = head[:, None] * HEAD_SIZE + element[None, :]
        question = tl.load(query + asked, mask=is_head, other=0)
        entries = block_table + req * table_width
        total = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        for first in range(first_key, full_end, KEYS):
            total, row_sum, row_max = attend_tile(
                total, row_sum, row_max, question, key_cache, value_cache, entries,
                kv_head, first, seq_len, scale,
                KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, False,
            )  # fmt: skip
        if full_end < end_key:
            total, row_sum, row_max = attend_tile(
                total, row_sum, row_max, question, key_cache, value_cache, entries,
                kv_head, full_end, seq_len, scale,
                KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, True,
            )  # fmt: skip
        first_span = ((req_begin + 1) * num_spans - 1) // num_tiles
        last_span = (req_end * num_spans - 1) // num_tiles
        if first_span == last_span:
            result = (total / row_sum[:, None]).to(out.dtype.element_ty)
            tl.store(out + asked, result, mask=is_head)
        else:
            write_part(
                part_total, part_sum, part_max, total, row_sum, row_max * LN_2,
                span, first_span, kv_head, QUERY_HEADS, KV_HEADS, HEAD_SIZE, ROWS,
            )  # fmt: skip
            join_if_last(
                part_total, part_sum, part_max, arrived, out,
                req, kv_head, first_span, last_span, QUERY_HEADS, KV_HEADS, HEAD_SIZE,
            )  # fmt: skip
        req_begin = req_end


@triton.jit
def attend_tile(
    total,
    row_sum,
    row_max,
    question,
    key_cache,
    value_cache,
    entries,
    kv_head,
    first,
    seq_len,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Return the running sums after one more tile of keys; EDGE: it may not be full."""
    element = tl.arange(0, HEAD_SIZE)
    position = first + tl.arange(0, KEYS)
    is_key = position < seq_len
    # step: look up the blocks and the offsets in them
    entry = entries + position // BLOCK_SIZE
    if EDGE:
        block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
    else:
        block_id = tl.load(entry).to(tl.int64)
    slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
    place = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
    if EDGE:
        key = tl.load(key_cache + place, mask=is_key[:, None], other=0)
        value = tl.load(value_cache + place, mask=is_key[:, None], other=0)
    else:
        key = tl.load(key_cache + place)
        value = tl.load(value_cache + place)
    # step: compute the scaled dot products of queries and keys
    scores = tl.dot(question, tl.trans(key)) * (scale * LOG2_E)
    if EDGE:
        scores = tl.where(is_key[None, :], scores, -float("inf"))
    # step: turn scores into weights (softmax)
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    fade = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    row_sum = row_sum * fade + tl.sum(weights, 1)
    # step: average the values by the weights
    total = tl.dot(weights.to(value.dtype), value, total * fade[:, None])
    return total, row_sum, new_max


prepare: Callable[..., Callable[[], None]] = partial(
    decode_6_balanced.prepare, kernel=edges_kernel
)
