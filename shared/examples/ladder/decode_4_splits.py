"""Split-KV decode: the keys of each row are divided evenly among several programs.

One request with 8 KV heads is 8 programs, and an H200 has 132 multiprocessors. So the keys of
each row are divided into as many splits as fill the chip twice. Each split stores a partial
result: the weighted values, the sum of the weights and the running maximum. A second kernel
combines the partial results. All rows have the same number of splits, so long rows still have
long splits.

`num_stages` sets how far loads are prefetched. The loads are indirect, through the block table.
Of such loads Triton keeps (num_stages - 1) // 2 tiles in flight: with 1 and 2 stages a tile is
loaded when it is needed, with 3 and 4 one tile ahead, with 5 two.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch, num_processors


@triton.jit
def parts_kernel(
    query,  # [reqs, QUERY_HEADS, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    value_cache,
    block_table,  # [reqs, table_width]
    seq_lens,
    partial_acc,  # [splits, reqs, QUERY_HEADS, HEAD_SIZE] float32
    partial_l,  # [splits, reqs, QUERY_HEADS] float32
    partial_m,
    table_width,
    scale,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    req = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = row < group
    head = req * QUERY_HEADS + kv_head * group + row
    q_offset = head[:, None] * HEAD_SIZE + element[None, :]
    q = tl.load(query + q_offset, mask=is_head[:, None], other=0)
    # step: take this split of the keys, in whole tiles
    seq_len = tl.load(seq_lens + req)
    split_keys = tl.cdiv(tl.cdiv(seq_len, KEYS), tl.num_programs(2)) * KEYS
    begin = split * split_keys
    end = tl.minimum(begin + split_keys, seq_len)
    acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    l_i = tl.zeros([ROWS], dtype=tl.float32)
    m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for first in range(begin, end, KEYS):
        # step: look up the blocks and the offsets in them
        position = first + tl.arange(0, KEYS)
        is_key = position < end
        entry = block_table + req * table_width + position // BLOCK_SIZE
        block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
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
    # an empty split has sum 0 and maximum -inf, so it adds nothing
    head += split * tl.num_programs(0) * QUERY_HEADS
    out_offset = head[:, None] * HEAD_SIZE + element[None, :]
    tl.store(partial_acc + out_offset, acc, mask=is_head[:, None])
    tl.store(partial_l + head, l_i, mask=is_head)
    tl.store(partial_m + head, m_i, mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def join_kernel(
    partial_acc,
    partial_l,
    partial_m,
    out,
    num_splits,
    HEAD_SIZE: tl.constexpr,
):
    """Combine the partial results of one query head of one request."""
    head = tl.program_id(0)
    element = tl.arange(0, HEAD_SIZE)
    acc = tl.zeros([HEAD_SIZE], dtype=tl.float32)
    l_i = 0.0
    m_i = -float("inf")
    for split in range(num_splits):
        partial = split * tl.num_programs(0) + head
        split_m = tl.load(partial_m + partial)
        m_new = tl.maximum(m_i, split_m)
        alpha = tl.exp(m_i - m_new)
        weight = tl.exp(split_m - m_new)
        l_i = l_i * alpha + tl.load(partial_l + partial) * weight
        split_acc = tl.load(partial_acc + partial * HEAD_SIZE + element)
        acc = acc * alpha + split_acc * weight
        m_i = m_new
    result = (acc / l_i).to(out.dtype.element_ty)
    tl.store(out + head * HEAD_SIZE + element, result)


def prepare(
    batch: LadderBatch,
    out: Tensor,
    keys: int = 128,
    num_warps: int = 4,
    num_stages: int = 1,
) -> Callable[[], None]:
    """Return what launches both kernels."""
    kv_heads = batch.key_cache.shape[2]
    rows = batch.reqs * kv_heads
    num_splits = max(1, 2 * num_processors(out.device) // rows)
    partial_acc = batch.query.new_empty(num_splits, *out.shape, dtype=torch.float32)
    partial_l, partial_m = (partial_acc.new_empty(partial_acc.shape[:-1]) for _ in "sm")

    def launch() -> None:
        parts_kernel[batch.reqs, kv_heads, num_splits](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            partial_acc,
            partial_l,
            partial_m,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            ROWS=16,
            KEYS=keys,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        join_kernel[(batch.reqs * batch.query.shape[1],)](
            partial_acc,
            partial_l,
            partial_m,
            out,
            num_splits,
            HEAD_SIZE=batch.query.shape[2],
        )

    return launch
