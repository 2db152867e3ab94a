"""What if the rows are not equally long?

Then a cut that is the same for all leaves most of the chip waiting for the longest row. Here the
tiles of all requests, laid end to end, are cut into spans that differ by one tile at most, and as
many programs start as the chip holds at once: for each kv head one a span. A span may begin and
end within a row. Nobody plans that beforehand: each program reads all lengths, adds them up and
finds its own span, which costs it a trip to memory and the host nothing.

Rows that one span holds whole are written at once. Of the others each span writes its part and
counts itself in; the last one to arrive joins the parts, in their order, so that the result does
not depend on who was last. That saves the second launch, and the counter is 0 again for the next
step.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch, num_processors

MAX_REQS = 256
"""Requests whose lengths a program adds up at once."""


@triton.jit(do_not_specialize=["num_reqs"])
def balanced_kernel(
    query,  # [reqs, QUERY_HEADS, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    value_cache,
    block_table,  # [reqs, table_width]
    seq_lens,
    out,
    part_total,  # [spans, 2, QUERY_HEADS, HEAD_SIZE] float32
    part_sum,  # [spans, 2, QUERY_HEADS] float32
    part_max,
    arrived,  # [reqs, KV_HEADS] zeros
    num_reqs,
    table_width,
    scale,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_REQS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    # the kv heads of a block are read at about the same time
    kv_head = tl.program_id(0) % KV_HEADS
    span = tl.program_id(0) // KV_HEADS
    # step: find this program's span of all tiles
    index = tl.arange(0, MAX_REQS)
    tiles = tl.load(seq_lens + index, mask=index < num_reqs, other=0)
    tiles = tl.cdiv(tiles, KEYS)
    num_tiles = tl.sum(tiles, 0)
    num_spans = tl.minimum(tl.num_programs(0) // KV_HEADS, num_tiles)
    if span >= num_spans:
        return
    begin = span * num_tiles // num_spans
    end = (span + 1) * num_tiles // num_spans
    req_ends = tl.cumsum(tiles, 0)
    first_req = tl.sum((req_ends <= begin).to(tl.int32), 0)
    last_req = tl.sum((req_ends < end).to(tl.int32), 0)
    req_begin = tl.sum(tl.where(index < first_req, tiles, 0), 0)

    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    element = tl.arange(0, HEAD_SIZE)
    row = tl.arange(0, ROWS)
    is_head = (row < group)[:, None]
    for req in range(first_req, last_req + 1):
        # step: take this span's share of the request's keys
        seq_len = tl.load(seq_lens + req)
        req_end = req_begin + tl.cdiv(seq_len, KEYS)
        first_key = (tl.maximum(begin, req_begin) - req_begin) * KEYS
        end_key = tl.minimum((end - req_begin) * KEYS, seq_len)
        head = req * QUERY_HEADS + kv_head * group + row
        asked = head[:, None] * HEAD_SIZE + element[None, :]
        question = tl.load(query + asked, mask=is_head, other=0)
        total = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        for first in range(first_key, end_key, KEYS):
            # step: look up the blocks and the offsets in them
            position = first + tl.arange(0, KEYS)
            is_key = position < end_key
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
        # tile t lies in span ((t + 1) * num_spans - 1) // num_tiles
        first_span = ((req_begin + 1) * num_spans - 1) // num_tiles
        last_span = (req_end * num_spans - 1) // num_tiles
        if first_span == last_span:
            result = (total / row_sum[:, None]).to(out.dtype.element_ty)
            tl.store(out + asked, result, mask=is_head)
        else:
            write_part(
                part_total, part_sum, part_max, total, row_sum, row_max,
                span, first_span, kv_head, QUERY_HEADS, KV_HEADS, HEAD_SIZE, ROWS,
            )  # fmt: skip
            join_if_last(
                part_total, part_sum, part_max, arrived, out,
                req, kv_head, first_span, last_span, QUERY_HEADS, KV_HEADS, HEAD_SIZE,
            )  # fmt: skip
        req_begin = req_end


@triton.jit
def write_part(
    part_total,
    part_sum,
    part_max,
    total,
    row_sum,
    row_max,
    span,
    first_span,
    kv_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write a span's part of a row: one it begins with (place 0), or one that goes on (1)."""
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    place = (2 * span + (span == first_span).to(tl.int32)) * QUERY_HEADS
    place += kv_head * group + row
    tl.store(part_sum + place, row_sum, mask=row < group)
    tl.store(part_max + place, row_max, mask=row < group)
    place = place[:, None] * HEAD_SIZE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(part_total + place, total, mask=(row < group)[:, None])


@triton.jit
def join_if_last(
    part_total,
    part_sum,
    part_max,
    arrived,
    out,
    req,
    kv_head,
    first_span,
    last_span,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PARTS: tl.constexpr = 16,
):
    """Count this span in; if all others of the request are, join their parts, 16 at once."""
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    counter = arrived + req * KV_HEADS + kv_head
    # all threads have written before one of them says so
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == last_span - first_span:
        tl.store(counter, 0)
        head = kv_head * group + tl.arange(0, group)
        element = tl.arange(0, HEAD_SIZE)
        total = tl.zeros([group, HEAD_SIZE], dtype=tl.float32)
        row_sum = tl.zeros([group], dtype=tl.float32)
        row_max = tl.full([group], -float("inf"), dtype=tl.float32)
        for first in range(first_span, last_span + 1, PARTS):
            span = first + tl.arange(0, PARTS)
            is_part = span <= last_span
            place = (2 * span + (span == first_span).to(tl.int32)) * QUERY_HEADS
            place = place[:, None] + head[None, :]
            # others wrote them: read the L2 cache, which all share, not this processor's own
            its_max = tl.load(
                part_max + place, is_part[:, None], -float("inf"), cache_modifier=".cg"
            )
            its_sum = tl.load(
                part_sum + place, is_part[:, None], 0, cache_modifier=".cg"
            )
            place = place[:, :, None] * HEAD_SIZE + element[None, None, :]
            its_total = tl.load(
                part_total + place, is_part[:, None, None], 0, cache_modifier=".cg"
            )
            new_max = tl.maximum(row_max, tl.max(its_max, 0))
            fade = tl.exp(row_max - new_max)
            weight = tl.exp(its_max - new_max[None, :])
            row_sum = row_sum * fade + tl.sum(its_sum * weight, 0)
            total = total * fade[:, None] + tl.sum(its_total * weight[:, :, None], 0)
            row_max = new_max
        written = (req * QUERY_HEADS + head)[:, None] * HEAD_SIZE + element[None, :]
        result = (total / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + written, result)


def prepare(
    batch: LadderBatch,
    out: Tensor,
    keys: int = 128,
    num_warps: int = 4,
    num_stages: int = 3,
    programs: int = 2,
    even: bool = False,
    kernel: triton.JITFunction = balanced_kernel,
) -> Callable[[], None]:
    """Return what launches the kernel once.

    Args:
        batch, out: what is attended, and where to.
        keys: of a tile.
        num_warps, num_stages: of a program.
        programs: that a multiprocessor holds at once.
        even: whether the spans of a kv head are a power of two, which even batches divide by.
        kernel: this one, or one that takes the same arguments.
    """
    kv_heads = batch.key_cache.shape[2]
    if batch.reqs > MAX_REQS:
        raise ValueError(f"reqs = {batch.reqs}: expected at most {MAX_REQS}")
    spans = max(1, programs * num_processors(out.device) // kv_heads)
    if even:
        spans = 1 << spans.bit_length() - 1
    part_total = torch.empty(spans, 2, *out.shape[1:], device=out.device)
    part_sum, part_max = (part_total.new_empty(part_total.shape[:-1]) for _ in "sm")
    arrived = torch.zeros(batch.reqs, kv_heads, dtype=torch.int32, device=out.device)

    def launch() -> None:
        kernel[(spans * kv_heads,)](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            out,
            part_total,
            part_sum,
            part_max,
            arrived,
            batch.reqs,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            MAX_REQS=MAX_REQS,
            ROWS=16,
            KEYS=keys,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    return launch
