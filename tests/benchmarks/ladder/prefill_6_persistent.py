"""What does it cost to start a program for each tile?

Each start pays for its index arithmetic and for the first loads, which nothing hides, and the
order in which tiles are taken is the scheduler's. Here as many programs start as the chip holds
at once, and each takes tile after tile, the longest first. The tiles are dealt out to and fro: in
each second round the program that had the longest gets the shortest, so that all of them have
about the same in the end.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .batches import LadderBatch, num_processors
from .prefill_4_diagonal import attend_rows


@triton.jit(do_not_specialize=["num_reqs", "num_tiles"])
def persistent_kernel(
    query,  # [tokens, QUERY_HEADS, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    value_cache,
    block_table,  # [reqs, table_width]
    query_start_loc,
    seq_lens,
    out,
    num_reqs,
    num_tiles,  # of the longest request
    table_width,
    scale,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    # one of each head of each request is as long as the next
    equals = num_reqs * QUERY_HEADS
    num_items = num_tiles * equals
    for turn in range(tl.cdiv(num_items, num_programs)):
        # step: take the next tile, to and fro
        back = num_programs - 1 - program
        item = turn * num_programs + tl.where(turn % 2 == 0, program, back)
        if item < num_items:
            tile = num_tiles - 1 - item // equals
            req = item % equals // QUERY_HEADS
            head = item % QUERY_HEADS
            attend_rows(
                query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out,
                table_width, scale, req, head, tile,
                QUERY_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, ROWS, KEYS,
            )  # fmt: skip


def prepare(
    batch: LadderBatch,
    out: Tensor,
    rows: int = 128,
    keys: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    programs: int = 2,
) -> Callable[[], None]:
    """Return what launches the kernel; `programs` is how many a multiprocessor holds at once."""
    grid = (programs * num_processors(out.device),)
    num_tiles = triton.cdiv(max(batch.query_lens), rows)

    def launch() -> None:
        persistent_kernel[grid](
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            out,
            batch.reqs,
            num_tiles,
            batch.table_width,
            batch.scale,
            **batch.sizes,
            ROWS=rows,
            KEYS=keys,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    return launch
