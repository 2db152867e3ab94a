"""Prefill with masks at the diagonal only, and with the longest tiles first.

Only tiles at the diagonal have masked keys. All earlier tiles are full, and every token of the
query tile attends to all of their keys. So the loop runs twice, without masks and then with them.
Scores are in units of log2(e), because the chip computes powers of 2. Tiles of 128 tokens halve
the loads.

The last query tile of a prompt has the most keys. If tiles start in order, the longest ones start
last, and at the end a few programs run alone. If the longest tiles start first, the short ones
fill the gaps. The longest tiles of all heads and requests start before any shorter tile.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def diagonal_kernel(
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
    LONGEST_FIRST: tl.constexpr,
):
    # a GPU starts programs in the order of their first number, then of the second, then the third
    if LONGEST_FIRST:
        head = tl.program_id(0)
        req = tl.program_id(1)
        tile = tl.num_programs(2) - 1 - tl.program_id(2)
    else:
        tile = tl.program_id(0)
        head = tl.program_id(1)
        req = tl.program_id(2)
    attend_rows(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out,
        table_width, scale, req, head, tile,
        QUERY_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, ROWS, KEYS,
    )  # fmt: skip


@triton.jit
def attend_rows(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    out,
    table_width,
    scale,
    req,
    head,
    tile,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute one query tile of a request, if the request has so many tokens."""
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    if tile * ROWS < query_len:
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
        # the tile's first token attends to all keys of the full tiles
        full_end = (context + tile * ROWS + 1) // KEYS * KEYS
        end = context + tl.minimum((tile + 1) * ROWS, query_len)
        table_row = block_table + req * table_width
        acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
        l_i = tl.zeros([ROWS], dtype=tl.float32)
        m_i = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        acc, l_i, m_i = attend_keys(
            acc, l_i, m_i, q, key_cache, value_cache, table_row,
            kv_head, query_position, 0, full_end, scale,
            KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, False,
        )  # fmt: skip
        acc, l_i, m_i = attend_keys(
            acc, l_i, m_i, q, key_cache, value_cache, table_row,
            kv_head, query_position, full_end, end, scale,
            KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, True,
        )  # fmt: skip
        result = (acc / l_i[:, None]).to(out.dtype.element_ty)
        tl.store(out + q_offset, result, mask=is_token)


@triton.jit
def attend_keys(
    acc,
    l_i,
    m_i,
    q,
    key_cache,
    value_cache,
    table_row,
    kv_head,
    query_position,
    begin,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Return the running sums after the keys from `begin` to `end`; EDGE: with a mask."""
    element = tl.arange(0, HEAD_SIZE)
    for first in range(begin, end, KEYS):
        position = first + tl.arange(0, KEYS)
        is_key = position < end
        # step: look up the blocks and the offsets in them
        entry = table_row + position // BLOCK_SIZE
        if EDGE:
            block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        else:
            block_id = tl.load(entry).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
        if EDGE:
            k = tl.load(key_cache + kv_offset, mask=is_key[:, None], other=0)
            v = tl.load(value_cache + kv_offset, mask=is_key[:, None], other=0)
        else:
            k = tl.load(key_cache + kv_offset)
            v = tl.load(value_cache + kv_offset)
        # step: compute the scaled dot products of queries and keys
        qk = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        # step: mask the keys outside the visible range
        if EDGE:
            qk = tl.where(
                position[None, :] <= query_position[:, None], qk, -float("inf")
            )
        # step: turn scores into weights (softmax)
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(qk - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        # step: average the values by the weights
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, l_i, m_i


def prepare(
    batch: LadderBatch,
    out: Tensor,
    rows: int = 128,
    keys: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    longest_first: bool = False,
) -> Callable[[], None]:
    """Return what launches the kernel."""
    num_tiles = triton.cdiv(max(batch.query_lens), rows)
    grid = (num_tiles, batch.query.shape[1], batch.reqs)
    if longest_first:
        grid = (*grid[1:], num_tiles)

    def launch() -> None:
        diagonal_kernel[grid](
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
            LONGEST_FIRST=longest_first,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    return launch
