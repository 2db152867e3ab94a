"""Decode with masks on the last tile of a row only, and with exponentials to base 2.

All tiles of a row but its last one are full, so their loads and scores need no mask. The loop is
compiled twice: for full tiles without masks, and for the last tile. The chip computes powers of
2, not of e. Scores are in units of log2(e), which is one factor in the scale, and each
exponential saves a multiplication.
"""

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl

from . import decode_6_balanced
from .decode_6_balanced import combine_if_last, store_partial

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
    last_req = tl.sum((req_ends < end).to(tl.int32), 0)
    req_begin = tl.sum(tl.where(index < first_req, tiles, 0), 0)

    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = (row < group)[:, None]
    for req in range(first_req, last_req + 1):
        # step: take the request's keys that are in the segment
        seq_len = tl.load(seq_lens + req)
        req_end = req_begin + tl.cdiv(seq_len, KEYS)
        first_key = (tl.maximum(begin, req_begin) - req_begin) * KEYS
        end_key = tl.minimum((end - req_begin) * KEYS, seq_len)
        full_end = end_key // KEYS * KEYS
        head = req * QUERY_HEADS + kv_head * group + row
        q_offset = head[:, None] * HEAD_SIZE + element[None, :]
        q = tl.load(query + q_offset, mask=is_head, other=0)
        table_row = block_table + req * table_width
        acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
        l_i = tl.zeros([ROWS], dtype=tl.float32)
        m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        for first in range(first_key, full_end, KEYS):
            acc, l_i, m_i = attend_tile(
                acc, l_i, m_i, q, key_cache, value_cache, table_row,
                kv_head, first, seq_len, scale,
                KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, False,
            )  # fmt: skip
        if full_end < end_key:
            acc, l_i, m_i = attend_tile(
                acc, l_i, m_i, q, key_cache, value_cache, table_row,
                kv_head, full_end, seq_len, scale,
                KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, True,
            )  # fmt: skip
        first_segment = ((req_begin + 1) * num_segments - 1) // num_tiles
        last_segment = (req_end * num_segments - 1) // num_tiles
        if first_segment == last_segment:
            result = (acc / l_i[:, None]).to(out.dtype.element_ty)
            tl.store(out + q_offset, result, mask=is_head)
        else:
            store_partial(
                partial_acc, partial_l, partial_m, acc, l_i, m_i * LN_2,
                segment, first_segment, kv_head, QUERY_HEADS, KV_HEADS, HEAD_SIZE, ROWS,
            )  # fmt: skip
            combine_if_last(
                partial_acc, partial_l, partial_m, arrivals, out,
                req, kv_head, first_segment, last_segment, QUERY_HEADS, KV_HEADS, HEAD_SIZE,
            )  # fmt: skip
        req_begin = req_end


@triton.jit
def attend_tile(
    acc,
    l_i,
    m_i,
    q,
    key_cache,
    value_cache,
    table_row,
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
    entry = table_row + position // BLOCK_SIZE
    if EDGE:
        block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
    else:
        block_id = tl.load(entry).to(tl.int64)
    slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
    kv_offset = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
    if EDGE:
        k = tl.load(key_cache + kv_offset, mask=is_key[:, None], other=0)
        v = tl.load(value_cache + kv_offset, mask=is_key[:, None], other=0)
    else:
        k = tl.load(key_cache + kv_offset)
        v = tl.load(value_cache + kv_offset)
    # step: compute the scaled dot products of queries and keys
    qk = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
    if EDGE:
        qk = tl.where(is_key[None, :], qk, -float("inf"))
    # step: turn scores into weights (softmax)
    m_new = tl.maximum(m_i, tl.max(qk, 1))
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(qk - m_new[:, None])
    l_i = l_i * alpha + tl.sum(p, 1)
    # step: average the values by the weights
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, l_i, m_new


prepare: Callable[..., Callable[[], None]] = partial(
    decode_6_balanced.prepare, kernel=edges_kernel
)
