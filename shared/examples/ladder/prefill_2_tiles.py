"""Prefill with a tile of neighbouring tokens per program, on tensor cores.

A program has a tile of tokens of one query head, and each key that it loads is used for all of
them, in one matrix product. With 16 tokens the loads are a sixteenth; with 64, a sixty-fourth. 64
rows also suit the tensor cores: Hopper's own matrix instruction takes 64 rows, and 16 rows use
the older one.

Half of the tile at the diagonal is masked: a token does not attend to later keys. This kernel
applies the mask to every tile.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch


@triton.jit
def tiles_kernel(
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
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    req = tl.program_id(2)
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    if tile * ROWS >= query_len:
        return
    kv_head = head // (QUERY_HEADS // KV_HEADS)
    element = tl.arange(0, HEAD_SIZE)
    token = tile * ROWS + tl.arange(0, ROWS)
    is_token = (token < query_len)[:, None]
    row = (start + token).to(tl.int64) * QUERY_HEADS + head
    q_offset = row[:, None] * HEAD_SIZE + element[None, :]
    q = tl.load(query + q_offset, mask=is_token, other=0)
    # token j of query_len has position seq_len - query_len + j
    context = tl.load(seq_lens + req) - query_len
    query_position = context + token
    end = context + tl.minimum((tile + 1) * ROWS, query_len)
    acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    l_i = tl.zeros([ROWS], dtype=tl.float32)
    m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for first in range(0, end, KEYS):
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
        # step: mask the keys outside the visible range
        qk = tl.where(position[None, :] <= query_position[:, None], qk, -float("inf"))
        # step: turn scores into weights (softmax)
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        # step: average the values by the weights
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    result = (acc / l_i[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_offset, result, mask=is_token)


def prepare(
    batch: LadderBatch,
    out: Tensor,
    rows: int = 16,
    keys: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Callable[[], None]:
    """Return what launches the kernel."""
    num_tiles = triton.cdiv(max(batch.query_lens), rows)
    grid = (num_tiles, batch.query.shape[1], batch.reqs)

    def launch() -> None:
        tiles_kernel[grid](
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
            num_warps=num_warps,
            num_stages=num_stages,
        )

    return launch
