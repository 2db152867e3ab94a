"""Decode with the query heads of a group as the rows of one tile, on tensor cores.

One program per KV head of each request. Each key is loaded once for all query heads that share
it: with 32 query heads and 8 KV heads, a quarter of the loads. A matrix product has at least 16
rows, so with 4 heads three rows in four are empty. That hardly matters: the tensor cores wait for
memory anyway, and the products no longer take time of the FMA units.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch


@triton.jit
def tensor_cores_kernel(
    query,  # [reqs, QUERY_HEADS, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    value_cache,
    block_table,  # [reqs, table_width]
    seq_lens,
    out,
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
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = (row < group)[:, None]
    head = req * QUERY_HEADS + kv_head * group + row
    q_offset = head[:, None] * HEAD_SIZE + element[None, :]
    q = tl.load(query + q_offset, mask=is_head, other=0)
    seq_len = tl.load(seq_lens + req)
    acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    l_i = tl.zeros([ROWS], dtype=tl.float32)
    m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for first in range(0, seq_len, KEYS):
        # step: look up the blocks and the offsets in them
        position = first + tl.arange(0, KEYS)
        is_key = position < seq_len
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
    result = (acc / l_i[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_offset, result, mask=is_head)


def prepare(
    batch: LadderBatch, out: Tensor, keys: int = 128, num_warps: int = 4
) -> Callable[[], None]:
    """Return what launches the kernel."""
    grid = (batch.reqs, batch.key_cache.shape[2])

    def launch() -> None:
        tensor_cores_kernel[grid](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            out,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            ROWS=16,
            KEYS=keys,
            num_warps=num_warps,
            num_stages=1,
        )

    return launch
