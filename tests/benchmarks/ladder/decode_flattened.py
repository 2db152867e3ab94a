"""Does it hurt that a span's loop begins anew with each request?

At the end of a row the loads that run ahead stop, the result is written, and the next row starts
with nothing in flight. This kernel has one loop over all tiles of its span instead: where a row
ends, it writes, sets its sums back and goes on, and loads run ahead across rows. The price is
that each tile asks which row it belongs to, and carries the answer along.
"""

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl

from . import decode_6_balanced
from .decode_6_balanced import join_if_last, write_part


@triton.jit(do_not_specialize=["num_reqs"])
def flattened_kernel(
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
    req_begin = tl.sum(tl.where(index < first_req, tiles, 0), 0)

    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = (row < group)[:, None]
    req = first_req
    seq_len = tl.load(seq_lens + req)
    total = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for tile in range(begin, end):
        # step: look up the blocks and the offsets in them
        position = (tile - req_begin) * KEYS + tl.arange(0, KEYS)
        is_key = position < seq_len
        entry = block_table + req * table_width + position // BLOCK_SIZE
        block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        place = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
        key = tl.load(key_cache + place, mask=is_key[:, None], other=0)
        value = tl.load(value_cache + place, mask=is_key[:, None], other=0)
        head = req * QUERY_HEADS + kv_head * group + row
        asked = head[:, None] * HEAD_SIZE + element[None, :]
        question = tl.load(query + asked, mask=is_head, other=0)
        # step: compute the scaled dot products of queries and keys
        scores = tl.dot(question, tl.trans(key)) * scale
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        # step: turn scores into weights (softmax)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        fade = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max[:, None])
        row_sum = row_sum * fade + tl.sum(weights, 1)
        row_max = new_max
        # step: average the values by the weights
        total = tl.dot(weights.to(value.dtype), value, total * fade[:, None])
        # step: finish the row where it ends
        req_end = req_begin + tl.cdiv(seq_len, KEYS)
        is_last = (tile + 1 == req_end) | (tile + 1 == end)
        if is_last:
            first_span = ((req_begin + 1) * num_spans - 1) // num_tiles
            last_span = (req_end * num_spans - 1) // num_tiles
            if first_span == last_span:
                result = (total / row_sum[:, None]).to(out.dtype.element_ty)
                tl.store(out + asked, result, mask=is_head)
            else:
                write_part(
                    part_total, part_sum, part_max, total, row_sum, row_max,
                    span, first_span, kv_head, QUERY_HEADS, KV_HEADS, HEAD_SIZE, ROWS,
                )  # fmt: skip
        total = tl.where(is_last, 0.0, total)
        row_sum = tl.where(is_last, 0.0, row_sum)
        row_max = tl.where(is_last, -float("inf"), row_max)
        # behind the last tile of all there is no next request
        has_next = is_last & (tile + 1 < num_tiles)
        req_begin = tl.where(is_last, req_end, req_begin)
        req = tl.where(has_next, req + 1, req)
        seq_len = tl.load(seq_lens + req)
    # a barrier within the loop would end what runs ahead: the first row and the last wait till here
    last_req = tl.sum((req_ends < end).to(tl.int32), 0)
    for end_of_span in tl.static_range(2):
        req = last_req if end_of_span else first_req
        req_end = tl.sum(tl.where(index <= req, tiles, 0), 0)
        req_begin = req_end - tl.cdiv(tl.load(seq_lens + req), KEYS)
        first_span = ((req_begin + 1) * num_spans - 1) // num_tiles
        last_span = (req_end * num_spans - 1) // num_tiles
        is_new = (end_of_span == 0) | (last_req != first_req)
        if is_new & (first_span != last_span):
            join_if_last(
                part_total, part_sum, part_max, arrived, out,
                req, kv_head, first_span, last_span, QUERY_HEADS, KV_HEADS, HEAD_SIZE,
            )  # fmt: skip


prepare: Callable[..., Callable[[], None]] = partial(
    decode_6_balanced.prepare, kernel=flattened_kernel
)
