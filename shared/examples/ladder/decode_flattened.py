"""Stream-K decode with one loop over all tiles of a segment, tried instead of one per row.

At the end of a row, prefetching stops, the result is stored, and the next row starts with no load
in flight. This kernel has a single loop over the tiles of its segment: at the end of a row it
stores the result and resets its sums, and loads are prefetched across rows. In return each tile
finds out to which row it belongs, and the state of the row is carried through the loop.
"""

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl

from . import decode_6_balanced
from .decode_6_balanced import combine_if_last, store_partial


@triton.jit(do_not_specialize=["num_reqs"])
def flattened_kernel(
    query,  # [reqs, QUERY_HEADS, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    value_cache,
    block_table,  # [reqs, table_width]
    seq_lens,
    out,
    partial_acc,  # [segments, 2, QUERY_HEADS, HEAD_SIZE] float32
    partial_l,  # [segments, 2, QUERY_HEADS] float32
    partial_m,
    arrivals,  # [reqs, KV_HEADS] zeros
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
    segment = tl.program_id(0) // KV_HEADS
    # step: find this program's segment of all tiles
    index = tl.arange(0, MAX_REQS)
    tiles = tl.load(seq_lens + index, mask=index < num_reqs, other=0)
    tiles = tl.cdiv(tiles, KEYS)
    num_tiles = tl.sum(tiles, 0)
    num_segments = tl.minimum(tl.num_programs(0) // KV_HEADS, num_tiles)
    if segment >= num_segments:
        return
    begin = segment * num_tiles // num_segments
    end = (segment + 1) * num_tiles // num_segments
    req_ends = tl.cumsum(tiles, 0)
    first_req = tl.sum((req_ends <= begin).to(tl.int32), 0)
    req_begin = tl.sum(tl.where(index < first_req, tiles, 0), 0)

    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = (row < group)[:, None]
    req = first_req
    seq_len = tl.load(seq_lens + req)
    acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    l_i = tl.zeros([ROWS], dtype=tl.float32)
    m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for tile in range(begin, end):
        # step: look up the blocks and the offsets in them
        position = (tile - req_begin) * KEYS + tl.arange(0, KEYS)
        is_key = position < seq_len
        entry = block_table + req * table_width + position // BLOCK_SIZE
        block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
        k = tl.load(key_cache + kv_offset, mask=is_key[:, None], other=0)
        v = tl.load(value_cache + kv_offset, mask=is_key[:, None], other=0)
        head = req * QUERY_HEADS + kv_head * group + row
        q_offset = head[:, None] * HEAD_SIZE + element[None, :]
        q = tl.load(query + q_offset, mask=is_head, other=0)
        # step: compute the scaled dot products of queries and keys
        qk = tl.dot(q, tl.trans(k)) * scale
        qk = tl.where(is_key[None, :], qk, -float("inf"))
        # step: turn scores into weights (softmax)
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        # step: average the values by the weights
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        # step: finish the row where it ends
        req_end = req_begin + tl.cdiv(seq_len, KEYS)
        is_last = (tile + 1 == req_end) | (tile + 1 == end)
        if is_last:
            first_segment = ((req_begin + 1) * num_segments - 1) // num_tiles
            last_segment = (req_end * num_segments - 1) // num_tiles
            if first_segment == last_segment:
                result = (acc / l_i[:, None]).to(out.dtype.element_ty)
                tl.store(out + q_offset, result, mask=is_head)
            else:
                store_partial(
                    partial_acc, partial_l, partial_m, acc, l_i, m_i,
                    segment, first_segment, kv_head, QUERY_HEADS, KV_HEADS, HEAD_SIZE, ROWS,
                )  # fmt: skip
        acc = tl.where(is_last, 0.0, acc)
        l_i = tl.where(is_last, 0.0, l_i)
        m_i = tl.where(is_last, -float("inf"), m_i)
        # the last tile of all has no next request
        has_next = is_last & (tile + 1 < num_tiles)
        req_begin = tl.where(is_last, req_end, req_begin)
        req = tl.where(has_next, req + 1, req)
        seq_len = tl.load(seq_lens + req)
    # a barrier in the loop would end prefetching, so the first and last row are combined here
    last_req = tl.sum((req_ends < end).to(tl.int32), 0)
    for end_of_segment in tl.static_range(2):
        req = last_req if end_of_segment else first_req
        req_end = tl.sum(tl.where(index <= req, tiles, 0), 0)
        req_begin = req_end - tl.cdiv(tl.load(seq_lens + req), KEYS)
        first_segment = ((req_begin + 1) * num_segments - 1) // num_tiles
        last_segment = (req_end * num_segments - 1) // num_tiles
        is_new = (end_of_segment == 0) | (last_req != first_req)
        if is_new & (first_segment != last_segment):
            combine_if_last(
                partial_acc, partial_l, partial_m, arrivals, out,
                req, kv_head, first_segment, last_segment, QUERY_HEADS, KV_HEADS, HEAD_SIZE,
            )  # fmt: skip


prepare: Callable[..., Callable[[], None]] = partial(
    decode_6_balanced.prepare, kernel=flattened_kernel
)
