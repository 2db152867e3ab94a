"""Prefill variants: each block looked up once, and several query heads per tile.

A tile of 64 keys has 4 blocks, but the rungs look up a block for each key, 64 in all. `by_block`
looks up 4 and broadcasts them over their slots. The query heads of a group attend to the same
keys. With `heads` of them in one tile, as in decode, its 128 rows are fewer tokens, and fewer
keys at the diagonal are masked.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tried_kernel(
    query,  # [tokens, QUERY_HEADS, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    value_cache,
    block_table,  # [reqs, table_width]
    query_start_loc,
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
    HEADS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
):
    req = tl.program_id(1)
    tokens: tl.constexpr = ROWS // HEADS
    first_token = (tl.num_programs(2) - 1 - tl.program_id(2)) * tokens
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    if first_token >= query_len:
        return
    kv_head = tl.program_id(0) * HEADS // (QUERY_HEADS // KV_HEADS)
    element = tl.arange(0, HEAD_SIZE)
    token = first_token + tl.arange(0, ROWS) // HEADS
    head = tl.program_id(0) * HEADS + tl.arange(0, ROWS) % HEADS
    is_token = (token < query_len)[:, None]
    row = (start + token).to(tl.int64) * QUERY_HEADS + head
    q_offset = row[:, None] * HEAD_SIZE + element[None, :]
    q = tl.load(query + q_offset, mask=is_token, other=0)
    context = tl.load(seq_lens + req) - query_len
    query_position = context + token
    full_end = (context + first_token + 1) // KEYS * KEYS
    end = context + tl.minimum(first_token + tokens, query_len)
    table_row = block_table + req * table_width
    acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    l_i = tl.zeros([ROWS], dtype=tl.float32)
    m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for edge in tl.static_range(2):
        begin = full_end if edge else 0
        stop = end if edge else full_end
        for first in range(begin, stop, KEYS):
            position = first + tl.arange(0, KEYS)
            is_key = position < stop
            # step: look up the blocks and the offsets in them
            if BY_BLOCK:
                block = first // BLOCK_SIZE + tl.arange(0, KEYS // BLOCK_SIZE)
                is_block = block * BLOCK_SIZE < stop
                block_id = tl.load(table_row + block, mask=is_block, other=0)
                block_slot = block_id.to(tl.int64)[:, None] * BLOCK_SIZE
                slot = block_slot + tl.arange(0, BLOCK_SIZE)[None, :]
                slot = tl.reshape(slot, [KEYS])
            else:
                entry = table_row + position // BLOCK_SIZE
                block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
                slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
            kv_offset = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[
                None, :
            ]
            if edge:
                k = tl.load(key_cache + kv_offset, mask=is_key[:, None], other=0)
                v = tl.load(value_cache + kv_offset, mask=is_key[:, None], other=0)
            else:
                k = tl.load(key_cache + kv_offset)
                v = tl.load(value_cache + kv_offset)
            # step: compute the scaled dot products of queries and keys
            qk = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
            # step: mask the keys outside the visible range
            if edge:
                is_visible = position[None, :] <= query_position[:, None]
                qk = tl.where(is_visible, qk, -float("inf"))
            # step: turn scores into weights (softmax)
            m_new = tl.maximum(m_i, tl.max(qk, 1))
            alpha = tl.exp2(m_i - m_new)
            p = tl.exp2(qk - m_new[:, None])
            l_i = l_i * alpha + tl.sum(p, 1)
            m_i = m_new
            # step: average the values by the weights
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    result = (acc / l_i[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_offset, result, mask=is_token)


def prepare(
    batch: LadderBatch,
    out: Tensor,
    rows: int = 128,
    keys: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    heads: int = 1,
    by_block: bool = False,
) -> Callable[[], None]:
    """Return what launches the kernel; it differs from rung 5 by what is asked for only."""
    group_size = batch.query.shape[1] // batch.key_cache.shape[2]
    if group_size % heads:
        raise ValueError(
            f"heads = {heads}: expected a divisor of {group_size}, a group"
        )
    num_tiles = triton.cdiv(max(batch.query_lens), rows // heads)
    grid = (batch.query.shape[1] // heads, batch.reqs, num_tiles)

    def launch() -> None:
        tried_kernel[grid](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            out,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            ROWS=rows,
            KEYS=keys,
            HEADS=heads,
            BY_BLOCK=by_block,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    return launch
