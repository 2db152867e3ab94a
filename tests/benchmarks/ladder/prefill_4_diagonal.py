"""What can be left out of the loop, and which tile should start first?

Only the tiles at the diagonal hide anything: all before them are full, and every token of the
tile sees all of their keys. So the loop runs twice, without masks and then with them. Scores are
measured in units of log2(e), because the chip computes powers of two. Tiles of 128 tokens halve
what is read again.

The last tile of a prompt has the most keys before it. If tiles start in their order, the longest
start last, and at the end a few programs work on alone. Started longest first, the short ones
fill the gaps. All heads and requests take their longest tile before anyone takes the next.
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
    """Attend with one tile of a request's tokens, if it has so many."""
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    if tile * ROWS < query_len:
        kv_head = head // (QUERY_HEADS // KV_HEADS)
        element = tl.arange(0, HEAD_SIZE)
        token = tile * ROWS + tl.arange(0, ROWS)
        is_token = (token < query_len)[:, None]
        row = (start + token).to(tl.int64) * QUERY_HEADS + head
        asked = row[:, None] * HEAD_SIZE + element[None, :]
        question = tl.load(query + asked, mask=is_token, other=0)
        # token j of q stands at position seq_len - q + j
        context = tl.load(seq_lens + req) - query_len
        seen = context + token
        # the tile's first token sees all of the full tiles
        full_end = (context + tile * ROWS + 1) // KEYS * KEYS
        end = context + tl.minimum((tile + 1) * ROWS, query_len)
        entries = block_table + req * table_width
        total = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        total, row_sum, row_max = attend_keys(
            total, row_sum, row_max, question, key_cache, value_cache, entries,
            kv_head, seen, 0, full_end, scale,
            KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, False,
        )  # fmt: skip
        total, row_sum, row_max = attend_keys(
            total, row_sum, row_max, question, key_cache, value_cache, entries,
            kv_head, seen, full_end, end, scale,
            KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS, True,
        )  # fmt: skip
        result = (total / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + asked, result, mask=is_token)


@triton.jit
def attend_keys(
    total,
    row_sum,
    row_max,
    question,
    key_cache,
    value_cache,
    entries,
    kv_head,
    seen,
    begin,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Return the running sums after the keys from `begin` to `end`; EDGE: some hide from some."""
    element = tl.arange(0, HEAD_SIZE)
    for first in range(begin, end, KEYS):
        position = first + tl.arange(0, KEYS)
        is_key = position < end
        # step: look up the blocks and the offsets in them
        entry = entries + position // BLOCK_SIZE
        if EDGE:
            block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        else:
            block_id = tl.load(entry).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        place = (slot * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + element[None, :]
        if EDGE:
            key = tl.load(key_cache + place, mask=is_key[:, None], other=0)
            value = tl.load(value_cache + place, mask=is_key[:, None], other=0)
        else:
            key = tl.load(key_cache + place)
            value = tl.load(value_cache + place)
        # step: compute the scaled dot products of queries and keys
        scores = tl.dot(question, tl.trans(key)) * (scale * LOG2_E)
        # step: mask the keys outside the visible range
        if EDGE:
            scores = tl.where(position[None, :] <= seen[:, None], scores, -float("inf"))
        # step: turn scores into weights (softmax)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        fade = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * fade + tl.sum(weights, 1)
        row_max = new_max
        # step: average the values by the weights
        total = tl.dot(weights.to(value.dtype), value, total * fade[:, None])
    return total, row_sum, row_max


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
