"""What does it gain to answer many tokens with one reading of the keys?

A program takes a tile of neighbouring tokens of one query head, and a key that was read is
compared with all of them, by a product of tiles. With 16 tokens that is a sixteenth of the
reading; with 64, a sixty-fourth, and the tensor cores get tiles that are worth their while:
Hopper's own instruction for products takes 64 rows, and 16 have to do with the older one.

Half of the tile at the diagonal is hidden: a token does not see the keys behind its own. This
kernel asks that of every tile, as if all of them lay there.
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
    asked = row[:, None] * HEAD_SIZE + element[None, :]
    question = tl.load(query + asked, mask=is_token, other=0)
    # token j of q stands at position seq_len - q + j
    context = tl.load(seq_lens + req) - query_len
    seen = context + token
    end = context + tl.minimum((tile + 1) * ROWS, query_len)
    total = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for first in range(0, end, KEYS):
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
        # step: mask the keys outside the visible range
        scores = tl.where(position[None, :] <= seen[:, None], scores, -float("inf"))
        # step: turn scores into weights (softmax)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        fade = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max[:, None])
        row_sum = row_sum * fade + tl.sum(weights, 1)
        row_max = new_max
        # step: average the values by the weights
        total = tl.dot(weights.to(value.dtype), value, total * fade[:, None])
    result = (total / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + asked, result, mask=is_token)


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
