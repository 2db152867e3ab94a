"""Triton kernels that only read, contiguously or through a block table, and an empty kernel.

Their bandwidth is the ceiling of attention.
"""

import triton
import triton.language as tl
from torch import Tensor

WORDS_PER_TILE = 4096
"""16 KiB: four loads of 16 bytes in flight in each of 256 threads."""
NUM_WARPS = 8
PROGRAMS_PER_SM = 4
"""As many as are resident at the same time. A second wave of few programs would be a slow tail."""


def read(source: Tensor, sums: Tensor) -> None:
    """Read all of a tensor.

    Args:
        source: [words] int32, a multiple of WORDS_PER_TILE.
        sums: [programs] int32, modified in place: a sum per program, so that no load can be
            optimized away.
    """
    num_tiles = source.numel() // WORDS_PER_TILE
    _read_kernel[(sums.numel(),)](
        source, sums, num_tiles, TILE=WORDS_PER_TILE, num_warps=NUM_WARPS
    )


def read_pages(source: Tensor, block_table: Tensor, sums: Tensor) -> None:
    """Read the blocks of a cache in the order of a table.

    Args:
        source: [num_blocks, words per block] int32. Words per block are a multiple of
            WORDS_PER_TILE.
        block_table: [blocks] int32.
        sums: [programs] int32, modified in place.
    """
    _read_pages_kernel[(sums.numel(),)](
        source,
        block_table,
        sums,
        block_table.numel(),
        WORDS=source.shape[1],
        TILE=WORDS_PER_TILE,
        num_warps=NUM_WARPS,
    )


def do_nothing(sums: Tensor) -> None:
    """Launch a kernel that stores one number."""
    _nothing_kernel[(1,)](sums)


@triton.jit
def _read_kernel(source, sums, num_tiles, TILE: tl.constexpr):
    program = tl.program_id(0)
    words = tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.int32)
    for tile in range(program, num_tiles, tl.num_programs(0)):
        # 64-bit: four gigabytes are 2**30 words, and a source may be larger
        total += tl.load(source + tl.cast(tile, tl.int64) * TILE + words)
    tl.store(sums + program, tl.sum(total))


@triton.jit
def _read_pages_kernel(
    source, block_table, sums, num_blocks, WORDS: tl.constexpr, TILE: tl.constexpr
):
    program = tl.program_id(0)
    words = tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.int32)
    for entry in range(program, num_blocks, tl.num_programs(0)):
        block = tl.load(block_table + entry).to(tl.int64)
        for begin in tl.static_range(0, WORDS, TILE):
            total += tl.load(source + block * WORDS + begin + words)
    tl.store(sums + program, tl.sum(total))


@triton.jit
def _nothing_kernel(sums):
    tl.store(sums, 0)
