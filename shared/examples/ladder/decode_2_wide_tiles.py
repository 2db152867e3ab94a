"""Decode with tiles of 64 keys, whose blocks are looked up together.

The grid is that of the rung below. The entries of the block table are loaded as a vector, so the
addresses of all keys of the tile are known at once. 32 KiB are in flight before the program
waits, where the rung below has 8. The maximum, the exponentials and the two sums depend on each
other; they are computed a quarter as often.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch


@triton.jit
def wide_tiles_kernel(
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
    KEYS: tl.constexpr,
):
    req = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (QUERY_HEADS // KV_HEADS)
    element = tl.arange(0, HEAD_SIZE)
    row = (req * QUERY_HEADS + head) * HEAD_SIZE + element
    q = tl.load(query + row).to(tl.float32)
    seq_len = tl.load(seq_lens + req)
    acc = tl.zeros([HEAD_SIZE], dtype=tl.float32)
    l_i = 0.0
    m_i = -float("inf")
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
        # step: compute the scaled dot products of the query and the keys
        qk = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
        qk = tl.where(is_key, qk, -float("inf"))
        # step: turn scores into weights (softmax)
        m_new = tl.maximum(m_i, tl.max(qk, 0))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        m_i = m_new
        # step: average the values by the weights
        acc = acc * alpha + tl.sum(p[:, None] * v.to(tl.float32), 0)
    tl.store(out + row, (acc / l_i).to(out.dtype.element_ty))


def prepare(
    batch: LadderBatch, out: Tensor, keys: int = 64, num_warps: int = 4
) -> Callable[[], None]:
    """Return what launches the kernel."""
    grid = (batch.reqs, batch.query.shape[1])

    def launch() -> None:
        wide_tiles_kernel[grid](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            out,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            KEYS=keys,
            num_warps=num_warps,
            num_stages=1,
        )

    return launch
