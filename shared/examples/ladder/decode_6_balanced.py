"""Stream-K decode: the KV tiles of all requests are concatenated and divided evenly.

With the same number of splits for all rows, most of the chip waits for the longest row. Here each
program processes one contiguous segment, and the segments differ by one tile at most. There are
as many programs as the chip holds at once: one per segment and KV head. A segment may begin and
end within a row. The host plans nothing: each program loads all lengths, sums them and
computes its own segment, which costs one memory access.

A row within one segment is stored at once. Of other rows each segment stores a partial result and
increments an arrival counter. The last program to arrive combines the partial results in the
order of their keys, so the result does not depend on which one is last. This saves the second
launch. The counter is reset to 0 for the next step.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch, num_processors

MAX_REQS = 256
"""Requests whose lengths a program adds up at once."""


@triton.jit(do_not_specialize=["num_reqs"])
def balanced_kernel(
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
    # the kv heads of a block are read at about the same time
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
        head = req * QUERY_HEADS + kv_head * group + row
        q_offset = head[:, None] * HEAD_SIZE + element[None, :]
        q = tl.load(query + q_offset, mask=is_head, other=0)
        acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
        l_i = tl.zeros([ROWS], dtype=tl.float32)
        m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        for first in range(first_key, end_key, KEYS):
            # step: look up the blocks and the offsets in them
            position = first + tl.arange(0, KEYS)
            is_key = position < end_key
            entry = block_table + req * table_width + position // BLOCK_SIZE
            block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
            slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
            kv_offset = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[
                None, :
            ]
            k = tl.load(key_cache + kv_offset, mask=is_key[:, None], other=0)
            v = tl.load(value_cache + kv_offset, mask=is_key[:, None], other=0)
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
        # tile t is in segment ((t + 1) * num_segments - 1) // num_tiles
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
            combine_if_last(
                partial_acc, partial_l, partial_m, arrivals, out,
                req, kv_head, first_segment, last_segment, QUERY_HEADS, KV_HEADS, HEAD_SIZE,
            )  # fmt: skip
        req_begin = req_end


@triton.jit
def store_partial(
    partial_acc,
    partial_l,
    partial_m,
    acc,
    l_i,
    m_i,
    segment,
    first_segment,
    kv_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store a segment's partial result of a row that began earlier (0), or that ends later (1)."""
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    partial = (2 * segment + (segment == first_segment).to(tl.int32)) * QUERY_HEADS
    partial += kv_head * group + row
    tl.store(partial_l + partial, l_i, mask=row < group)
    tl.store(partial_m + partial, m_i, mask=row < group)
    partial = partial[:, None] * HEAD_SIZE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(partial_acc + partial, acc, mask=(row < group)[:, None])


@triton.jit
def combine_if_last(
    partial_acc,
    partial_l,
    partial_m,
    arrivals,
    out,
    req,
    kv_head,
    first_segment,
    last_segment,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SPLITS: tl.constexpr = 16,
):
    """Count this arrival, and combine the partial results if it is the last, 16 at once."""
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    counter = arrivals + req * KV_HEADS + kv_head
    # all threads have stored before one of them arrives
    tl.debug_barrier()
    earlier = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if earlier == last_segment - first_segment:
        tl.store(counter, 0)
        head = kv_head * group + tl.arange(0, group)
        element = tl.arange(0, HEAD_SIZE)
        acc = tl.zeros([group, HEAD_SIZE], dtype=tl.float32)
        l_i = tl.zeros([group], dtype=tl.float32)
        m_i = tl.full([group], -float("inf"), dtype=tl.float32)
        for first in range(first_segment, last_segment + 1, SPLITS):
            segment = first + tl.arange(0, SPLITS)
            is_split = segment <= last_segment
            partial = (
                2 * segment + (segment == first_segment).to(tl.int32)
            ) * QUERY_HEADS
            partial = partial[:, None] + head[None, :]
            # other programs stored these, so they are not loaded from this one's L1 cache
            split_m = tl.load(
                partial_m + partial,
                is_split[:, None],
                -float("inf"),
                cache_modifier=".cg",
            )
            split_l = tl.load(
                partial_l + partial, is_split[:, None], 0, cache_modifier=".cg"
            )
            partial = partial[:, :, None] * HEAD_SIZE + element[None, None, :]
            split_acc = tl.load(
                partial_acc + partial, is_split[:, None, None], 0, cache_modifier=".cg"
            )
            m_new = tl.maximum(m_i, tl.max(split_m, 0))
            alpha = tl.exp(m_i - m_new)
            weight = tl.exp(split_m - m_new[None, :])
            l_i = l_i * alpha + tl.sum(split_l * weight, 0)
            acc = acc * alpha[:, None] + tl.sum(split_acc * weight[:, :, None], 0)
            m_i = m_new
        out_offset = (req * QUERY_HEADS + head)[:, None] * HEAD_SIZE + element[None, :]
        result = (acc / l_i[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_offset, result)


def prepare(
    batch: LadderBatch,
    out: Tensor,
    keys: int = 128,
    num_warps: int = 4,
    num_stages: int = 3,
    programs: int = 2,
    even: bool = False,
    kernel: triton.JITFunction = balanced_kernel,
) -> Callable[[], None]:
    """Return what launches the kernel once.

    Args:
        batch, out: the inputs and the output.
        keys: per tile.
        num_warps, num_stages: per program.
        programs: that a multiprocessor holds at once.
        even: whether the number of segments per KV head is a power of two, for even batches.
        kernel: this one, or another with the same arguments.
    """
    kv_heads = batch.key_cache.shape[2]
    if batch.reqs > MAX_REQS:
        raise ValueError(f"reqs = {batch.reqs}: expected at most {MAX_REQS}")
    segments = max(1, programs * num_processors(out.device) // kv_heads)
    if even:
        segments = 1 << segments.bit_length() - 1
    partial_acc = torch.empty(segments, 2, *out.shape[1:], device=out.device)
    partial_l, partial_m = (partial_acc.new_empty(partial_acc.shape[:-1]) for _ in "sm")
    arrivals = torch.zeros(batch.reqs, kv_heads, dtype=torch.int32, device=out.device)

    def launch() -> None:
        kernel[(segments * kv_heads,)](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            out,
            partial_acc,
            partial_l,
            partial_m,
            arrivals,
            batch.reqs,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            MAX_REQS=MAX_REQS,
            ROWS=16,
            KEYS=keys,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    return launch
