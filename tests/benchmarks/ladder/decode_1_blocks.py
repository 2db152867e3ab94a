"""What is the plainest kernel that is right?

One program for each query head of each request. It walks along the sequence block by block: looks
the block up, reads 16 keys and values, and folds them into its running sums. There is no product
of tiles: each score is a sum over the head's elements. The four query heads that share a kv head
read the same keys in four programs, and each program waits for one block before it asks for the
next.
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
    question = tl.load(query + row).to(tl.float32)
    seq_len = tl.load(seq_lens + req)
    total = tl.zeros([HEAD_SIZE], dtype=tl.float32)
    row_sum = 0.0
    row_max = -float("inf")
    for first in range(0, seq_len, BLOCK_SIZE):
        # step: look up the block
        block_id = tl.load(block_table + req * table_width + first // BLOCK_SIZE)
        slot = block_id.to(tl.int64) * BLOCK_SIZE + offset
        place = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
        # what lies behind the sequence may hold anything, and 0 * NaN is no 0
        is_key = first + offset < seq_len
        key = tl.load(key_cache + place, mask=is_key[:, None], other=0)
        value = tl.load(value_cache + place, mask=is_key[:, None], other=0)
        # step: compute the scaled dot products of the query and the keys
        scores = tl.sum(key.to(tl.float32) * question[None, :], 1) * scale
        scores = tl.where(is_key, scores, -float("inf"))
        # step: turn scores into weights (softmax)
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        fade = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max)
        row_sum = row_sum * fade + tl.sum(weights, 0)
        row_max = new_max
        # step: average the values by the weights
        total = total * fade + tl.sum(weights[:, None] * value.to(tl.float32), 0)
    tl.store(out + row, (total / row_sum).to(out.dtype.element_ty))


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
