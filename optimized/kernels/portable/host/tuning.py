"""Tuning constants: tile sizes, warps and stages of the portable attention kernels, per chip.

A tile has `block_m` rows (of one kv head: tokens times the query heads that share it) and `block_n`
keys. Loads that go through the block table are indirect, so of `num_stages` only
(num_stages - 1) // 2 KV tiles are in flight.

TABLE holds, for each size of a head in bytes, the decode tile and the prefill tile of a chip with
at least 160 KiB of shared memory per SM. SMALL is for all others, unknown ones included. The
interpreter has small tiles, so that short sequences already cross their edges.

Measured on an H200 (torch 2.11, triton 3.6, bfloat16, 32 query heads, 8 kv heads of 128, blocks of
16, cold L2, medians of 30; each pair from one run):

- Decodes with tiles of 16 x 128 and 4 warps, two programs per SM with 3 stages against one with 5:
  64 over 4,096 keys 263 us and 266, 256 of ragged lengths 526 and 554, with a window of 1,024 82.5
  and 89.8, 4 drafts each 264 and 272.
- If there is at most one row per program, one program with 5 stages is faster: 8 over 32,768 keys
  260 us against 266, one over 131,072 keys 142 against 148, 16 over 512 keys 20.8 against 24.2.
- With heads of 64 (20 over 1,500 keys), 5 stages and two programs: 146 us, against 157 with 3. 8
  warps and three programs were slower by a fifth and more.
- A prefill of 8,192 tokens took 1,658 us with 128 x 64, 4 warps, 3 stages. With 128 x 128, 8 warps,
  3 stages it took 1,768 to 1,791; with 5 stages 1,645, with twice the shared memory for 1 %. With
  64 rows it took 2,297 to 3,035.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from ....runtime.chip import find_shared_memory
from ....runtime.launcher import INTERPRETED


@dataclass(frozen=True)
class Tiles:
    """Rows and keys of a launch's tiles, its warps and pipeline stages.

    Args:
        programs: programs per SM of a stream-K partition. 0 stands for the default of its kernel.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 0


# bytes of a padded head: decode, prefill
TABLE = {
    128: (Tiles(16, 128, 4, 3), Tiles(128, 64, 4, 3)),
    256: (Tiles(16, 128, 4, 3), Tiles(128, 64, 4, 3)),
    512: (Tiles(16, 64, 4, 3), Tiles(64, 64, 8, 2)),
    1024: (Tiles(16, 32, 4, 2), Tiles(32, 32, 8, 2)),
    4096: (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
SMALL = {
    128: (Tiles(16, 64, 4, 3), Tiles(64, 64, 4, 2)),
    256: (Tiles(16, 64, 4, 3), Tiles(64, 32, 4, 2)),
    512: (Tiles(16, 32, 4, 2), Tiles(32, 32, 4, 1)),
    2048: (Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# float32 products do not run on tensor cores and take many more registers
FLOAT32 = {
    256: (Tiles(16, 64, 8, 2), Tiles(64, 32, 8, 2)),
    512: (Tiles(16, 64, 8, 2), Tiles(32, 32, 8, 1)),
    4096: (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
SMALL_FLOAT32 = {
    256: (Tiles(16, 64, 8, 2), Tiles(64, 32, 8, 1)),
    512: (Tiles(16, 32, 8, 2), Tiles(32, 32, 8, 1)),
    2048: (Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
IN_THE_INTERPRETER = {4096: (Tiles(16, 32, 4, 1), Tiles(32, 32, 4, 1))}

SHARED_MEMORY = 160 * 1024
MAX_HEAD_SIZE = 1024
PROGRAMS = 2
"""Decode programs per SM."""

MIN_SEGMENT = 32 if INTERPRETED else 512
"""Keys of a stream-K segment, at least: shorter ones are not worth a combination."""
SHORT_TILES = 2 if INTERPRETED else 20
"""KV tiles per program of few decodes by which the longest request may exceed the mean, at most.

The programs of few decodes save 2.5 to 10 us of launches in which stream-K counts tiles. One whose
KV tiles have 64 KiB takes 1.3 to 1.6 us per tile while others are done, and 1.9 us while the whole
chip reads. So with lengths between an eighth of the longest and the longest, which are 0.56 of it
on average, many requests lose as much as that at about 20 tiles."""

SHORT_REST_KEYS = 64 if INTERPRETED else 1024
"""Keys after a shared prefix, at most, for which each query tile of the rest has a program.

128 requests with 256 keys each take 54 us and 61 in a stream-K partition. With the prefix, 128 with
256 keys take 82 us and 89, 64 with 512 keys 80 and 87, 256 with 16 to 256 keys 81 and 118, 32 with
256 keys 82 and 90. 512 is the largest number of keys that is measured with so many programs."""
SHORT_REST_PROGRAMS = 1.5
"""Such programs per multiprocessor, at least. Batches with 1.9 and more gain. With 1, requests of
1,024 keys take 83 us and 82 in a stream-K partition, requests of 512 keys 56 and 54."""
SHORT_REST_TILES = (64, 4, 3)
"""Keys of a KV tile, warps and stages of these programs: 54.1 us. Others are (64, 2, 3): 53.2,
(128, 4, 3): 53.4, (32, 2, 5): 54.2, (32, 2, 3): 54.4 and (64, 4, 5): 59.1."""


@dataclass(frozen=True)
class Thresholds:
    """Limits between kernels, as the constants of the same names describe them."""

    min_segment: int = MIN_SEGMENT
    short_tiles: int = SHORT_TILES
    short_rest_keys: int = SHORT_REST_KEYS
    short_rest_programs: float = SHORT_REST_PROGRAMS


DECODE_KEYS_ROWS = 32
"""Rows of a split tile, at most, that has as many keys as a decode tile. Not measured yet."""


def choose_tiles(
    head_tile: int,
    dtype: torch.dtype,
    device: torch.device,
    has_window: bool,
    has_bias: bool = False,
    has_tree: bool = False,
    has_bit_decoding: bool = False,
    has_native_fp8: bool = False,
    is_paged: bool = True,
    has_splits: bool = False,
) -> tuple[Tiles, Tiles, Tiles]:
    """Return the tiles of decodes, of decodes in a small batch, and of prefills.

    Args:
        head_tile: elements of a head, rounded up to a power of two.
        dtype: of the queries.
        device: where the kernels run.
        has_window: whether there is a sliding window or a chunk. Many of a prefill's tiles are then
            masked, which takes registers, and it gets 8 warps (8,192 tokens, window 1,024: 538 us
            against 560 with 4; with cap, ALiBi and sinks 1,041 against 1,236. Without a window 4
            warps are faster, with a soft cap by 10 %).
        has_bias: whether a position bias is loaded for each score, whose addresses take
            registers: a prefill gets 8 warps (8,192 tokens: 3,498 us; 64 x 32 tiles 4,159 with
            4 warps and 4,679 with 8, 64 x 64 tiles with 8 warps 4,966).
        has_tree: whether a tree mask is loaded too: a prefill gets half the rows. With a bias
            too, every tile gets half the keys (sm_90, 128 x 64: 808 bytes spilled, with both
            1,384; halved: 48 and none).
        has_bit_decoding: whether codes are decoded without an instruction for it, which takes
            registers too (sm_80, 128 x 64: 6,608 bytes spilled; 64 x 64: none).
        has_native_fp8: whether FP8 numbers are decoded by an instruction. A tile takes half the
            bytes, and a decode has one more in flight.
        is_paged: whether loads go through the block table. If not, all stages are in flight.
        has_splits: whether rows are batch-invariant. One tile then serves decodes and prefills,
            and a program holds two accumulators. It gets 64 rows: 64 decodes over 4,096 keys take
            296 us, one over 131,072 168, a prefill of 8,192 tokens 1,781 (each tile in a run
            of its own; 128 x 64, 4 warps: 573, 301 and 1,978, 880 bytes spilled; with 8 warps 508,
            296 and 1,744; 128 x 128, 8 warps: 466, 279 and 1,633; 64 x 128, 8 warps: 426, 248 and
            2,791).
    """
    table = _table(dtype == torch.float32, device)
    width = head_tile * dtype.itemsize
    decode, prefill = next(tiles for limit, tiles in table.items() if width <= limit)
    if has_splits:
        prefill = replace(prefill, block_m=min(64, prefill.block_m))
    if has_window and prefill.num_warps < 8:
        prefill = replace(prefill, num_warps=8)
    if has_bit_decoding:
        prefill = replace(prefill, block_m=min(64, prefill.block_m), num_warps=8)
    if has_bias:
        prefill = replace(prefill, num_warps=8)
    if has_tree:
        block_m = max(16, prefill.block_m // 2)
        prefill = replace(prefill, block_m=block_m, num_warps=8, num_stages=2)
    if has_bias and has_tree:
        decode = replace(decode, block_n=max(16, decode.block_n // 2))
        prefill = replace(prefill, block_n=max(16, prefill.block_n // 2))
    small_batch = decode
    if decode.num_stages == 3 and is_paged and not INTERPRETED:
        # two programs share an SM, or one has it to itself and twice as much in flight
        small_batch = replace(decode, num_stages=5)
        if has_native_fp8 or width <= 128:
            decode = small_batch
    return decode, small_batch, prefill


def choose_short_rest_tiles(
    row_tiles: Sequence[Tiles], dtype: torch.dtype, block_m: int
) -> Tiles | None:
    """Return the tiles of short rests after a prefix; None if query tiles have other rows.

    Args:
        row_tiles: tiles of split requests, those of decodes first.
        block_m: rows of a query tile, those of one of `row_tiles`.
    """
    if INTERPRETED:
        # of any rows, so that small batches have several query tiles
        return next(tiles for tiles in row_tiles if tiles.block_m == block_m)
    decode = row_tiles[0]
    if block_m != decode.block_m:
        return None
    if dtype == torch.float32:
        return decode
    block_n, warps, stages = SHORT_REST_TILES
    return replace(
        decode,
        block_n=min(block_n, decode.block_n),
        num_warps=warps,
        num_stages=min(stages, decode.num_stages),
    )


def max_head_size(dtype: torch.dtype, device: torch.device) -> int:
    """Return the largest head size whose smallest tile fits the chip."""
    widest = max(_table(dtype == torch.float32, device))
    return min(MAX_HEAD_SIZE, widest // dtype.itemsize)


def choose_row_tiles(
    decode: Tiles, prefill: Tiles, is_paged: bool
) -> tuple[Tiles, ...]:
    """Return the tiles of split requests of any number of rows, the one with fewest rows first.

    Up to 32 rows a tile has the keys of a decode tile, because reading takes longer than its
    products. From 64 rows on it has those of a prefill tile, with 128 rows and 8 warps: with 4,
    triton 3.7 spills 336 bytes and reads them 129 times in the loops over the keys. One program of
    8 warps fits an SM, so it has one KV tile more in flight.

    Args:
        decode, prefill: what `choose_tiles` returns for these requests.
        is_paged: whether loads go through the block table.
    """
    tiles = [decode]
    for rows in (32, 64, 128):
        if decode.block_m < rows <= prefill.block_m:
            like = decode if rows <= DECODE_KEYS_ROWS else prefill
            tiles.append(replace(like, block_m=rows))
            if rows == 128:
                stages = 5 if is_paged and like.num_stages == 3 else like.num_stages
                tiles[-1] = replace(tiles[-1], num_warps=8, num_stages=stages)
    return tuple(tiles)


@cache
def _table(is_float32: bool, device: torch.device) -> dict[int, tuple[Tiles, Tiles]]:
    if INTERPRETED:
        return IN_THE_INTERPRETER
    if find_shared_memory(device) < SHARED_MEMORY:
        return SMALL_FLOAT32 if is_float32 else SMALL
    return FLOAT32 if is_float32 else TABLE
