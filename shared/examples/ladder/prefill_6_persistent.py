"""Persistent prefill: as many programs as the chip holds at once, each with several tiles.

Each start of a program costs index arithmetic and first loads that nothing overlaps with, and the
hardware scheduler decides the order of tiles. Here each program processes tile after tile, the
longest first. In every second wave the assignment is reversed: the program that had the longest
tile gets the shortest one, so all have about the same work in the end.
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
    # tiles with the same index are about as long in all heads and requests
    num_pairs = num_reqs * QUERY_HEADS
    num_items = num_tiles * num_pairs
    for wave in range(tl.cdiv(num_items, num_programs)):
        # step: take the next tile, in alternating order
        from_end = num_programs - 1 - program
        item = wave * num_programs + tl.where(wave % 2 == 0, program, from_end)
        if item < num_items:
            tile = num_tiles - 1 - item // num_pairs
            req = item % num_pairs // QUERY_HEADS
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
