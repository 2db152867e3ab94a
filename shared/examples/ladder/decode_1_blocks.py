"""The simplest correct decode kernel: one program per query head of each request.

It reads the sequence block by block: it looks the block up, loads 16 keys and values, and adds them
to its running sums. Each score is a sum over the elements of the head, not a matrix product. The
four query heads that share a KV head read the same keys in four programs. Each program waits for
one block before it loads the next.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch


@triton.jit
def blocks_kernel(
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
):
    req = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (QUERY_HEADS // KV_HEADS)
    element = tl.arange(0, HEAD_SIZE)
    offset = tl.arange(0, BLOCK_SIZE)
    row = (req * QUERY_HEADS + head) * HEAD_SIZE + element
    q = tl.load(query + row).to(tl.float32)
    seq_len = tl.load(seq_lens + req)
    acc = tl.zeros([HEAD_SIZE], dtype=tl.float32)
    l_i = 0.0
    m_i = -float("inf")
    for first in range(0, seq_len, BLOCK_SIZE):
        # step: look up the block
        block_id = tl.load(block_table + req * table_width + first // BLOCK_SIZE)
        slot = block_id.to(tl.int64) * BLOCK_SIZE + offset
        kv_offset = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
        # slots past the end of the sequence may hold NaN, and 0 * NaN = NaN
        is_key = first + offset < seq_len
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


def prepare(batch: LadderBatch, out: Tensor, num_warps: int = 4) -> Callable[[], None]:
    """Return what launches the kernel."""
    grid = (batch.reqs, batch.query.shape[1])

    def launch() -> None:
        blocks_kernel[grid](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            out,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            num_warps=num_warps,
            num_stages=1,
        )

    return launch
