"""What does it gain to read each key once for all query heads that share it?

One program for each kv head of each request. The query heads of its group are the rows of one
tile, so a key that was read serves all of them: with 32 query heads over 8 kv heads, a quarter of
the loads. A product of tiles has at least 16 rows, so with 4 heads three rows in four are empty.
That hardly matters: the tensor cores wait for memory anyway, and the products no longer take the
plain units' time.
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
    asked = head[:, None] * HEAD_SIZE + element[None, :]
    question = tl.load(query + asked, mask=is_head, other=0)
    seq_len = tl.load(seq_lens + req)
    total = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for first in range(0, seq_len, KEYS):
        # step: look up the blocks and the offsets in them
        position = first + tl.arange(0, KEYS)
        is_key = position < seq_len
        entry = block_table + req * table_width + position // BLOCK_SIZE
        block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        place = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
        key = tl.load(key_cache + place, mask=is_key[:, None], other=0)
        value = tl.load(value_cache + place, mask=is_key[:, None], other=0)
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
    result = (total / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + asked, result, mask=is_head)


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
