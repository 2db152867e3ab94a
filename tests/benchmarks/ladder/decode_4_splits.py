"""What if there are fewer rows than the chip has room for?

One request with 8 kv heads is 8 programs, and an H200 has 132 multiprocessors. So each row's keys
are cut into as many equal parts as fill the chip twice. A part's program writes what it has: the
weighted values, their sum and the maximum they were measured against. A second kernel joins the
parts. The cut is the same for every row of the batch, so long rows still have long parts.

`num_stages` decides how far the loads run ahead. They go through the block table, which makes
them indirect, and of such loads Triton keeps (num_stages - 1) // 2 tiles in flight: 1 and 2
stages read a tile when it is needed, 3 and 4 one tile ahead, 5 two.
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
    part_total,  # [parts, reqs, QUERY_HEADS, HEAD_SIZE] float32
    part_sum,  # [parts, reqs, QUERY_HEADS] float32
    part_max,
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
    part = tl.program_id(2)
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = row < group
    head = req * QUERY_HEADS + kv_head * group + row
    asked = head[:, None] * HEAD_SIZE + element[None, :]
    question = tl.load(query + asked, mask=is_head[:, None], other=0)
    # step: take this part's share of the keys, cut at whole tiles
    seq_len = tl.load(seq_lens + req)
    share = tl.cdiv(tl.cdiv(seq_len, KEYS), tl.num_programs(2)) * KEYS
    begin = part * share
    end = tl.minimum(begin + share, seq_len)
    total = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for first in range(begin, end, KEYS):
        # step: look up the blocks and the offsets in them
        position = first + tl.arange(0, KEYS)
        is_key = position < end
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
    # an empty part has the sum 0 and the maximum -inf, which is what joining needs
    head += part * tl.num_programs(0) * QUERY_HEADS
    written = head[:, None] * HEAD_SIZE + element[None, :]
    tl.store(part_total + written, total, mask=is_head[:, None])
    tl.store(part_sum + head, row_sum, mask=is_head)
    tl.store(part_max + head, row_max, mask=is_head)


@triton.jit(do_not_specialize=["num_parts"])
def join_kernel(
    part_total,
    part_sum,
    part_max,
    out,
    num_parts,
    HEAD_SIZE: tl.constexpr,
):
    """Join the parts of one query head of one request."""
    head = tl.program_id(0)
    element = tl.arange(0, HEAD_SIZE)
    total = tl.zeros([HEAD_SIZE], dtype=tl.float32)
    row_sum = 0.0
    row_max = -float("inf")
    for part in range(num_parts):
        place = part * tl.num_programs(0) + head
        its_max = tl.load(part_max + place)
        new_max = tl.maximum(row_max, its_max)
        fade = tl.exp(row_max - new_max)
        weight = tl.exp(its_max - new_max)
        row_sum = row_sum * fade + tl.load(part_sum + place) * weight
        its_total = tl.load(part_total + place * HEAD_SIZE + element)
        total = total * fade + its_total * weight
        row_max = new_max
    result = (total / row_sum).to(out.dtype.element_ty)
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
    num_parts = max(1, 2 * num_processors(out.device) // rows)
    part_total = batch.query.new_empty(num_parts, *out.shape, dtype=torch.float32)
    part_sum, part_max = (part_total.new_empty(part_total.shape[:-1]) for _ in "sm")

    def launch() -> None:
        parts_kernel[batch.reqs, kv_heads, num_parts](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            part_total,
            part_sum,
            part_max,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            ROWS=16,
            KEYS=keys,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        join_kernel[(batch.reqs * batch.query.shape[1],)](
            part_total,
            part_sum,
            part_max,
            out,
            num_parts,
            HEAD_SIZE=batch.query.shape[2],
        )

    return launch
