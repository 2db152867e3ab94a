"""Sizes of decodes: rows of a tile, KV tiles in flight, and programs per request.

A decode tile has all rows of a token, which are the query heads that share a kv head. The tiles of
tuning.py are for 16 rows. If a token has more, its queries and results take more shared memory, and
a launch that needs more than the chip has is an error.
"""

import math
from typing import NamedTuple

import torch

from .....contract.cache_formats import FORMATS
from ....runtime.chip import find_shared_memory
from ....runtime.launcher import INTERPRETED, next_power_of_2
from ..tables.kernel_tables import TileKey
from .tuning import SHARED_MEMORY, Thresholds, Tiles

MOST_ROWS = 64
"""Rows of a decode tile, at most."""
MOST_NUMBERS = {
    # whether the chip has SHARED_MEMORY, and whether the numbers are float32
    (True, False): 64 * (1024 + 512),
    (True, True): 32 * (512 + 512),
    (False, False): 32 * (1024 + 512),
    (False, True): 16 * (512 + 512),
}
"""Elements of a decode tile's queries and results, at most: padded rows times padded head sizes.

Compiled for sm_80 (163 KiB), sm_86 (99 KiB) and sm_90 (227 KiB) with triton 3.6 and 3.7: 64 rows of
latents of 576 and 512 take 160 KiB on sm_80 and sm_86, and 176 on sm_90. 32 rows of them take 96.
In float32, 32 rows of 512 take 128 KiB, and 16 rows 96. 64 rows of 1,024 and 1,024 take 256 KiB on
sm_90, and in float32 320."""

COMBINED_SHARE, COMBINED_NUMBERS = 0.1, 0.06
"""What one more partial result takes that a program combines, in times of a KV tile: whatever its
size, and per 1,024 numbers.

One request over 16,384 keys of one KV head of 128, whose tiles have 128 keys (H200, bfloat16, cold
L2, medians of 9), in us by splits. A tile takes 1.2 to 1.5 us, and 128 results take 30 to 75.

| query heads | 4    | 8    | 16   | 24   | 32   | 64   | 128  |
|-------------|-----:|-----:|-----:|-----:|-----:|-----:|-----:|
| 16          | 49.2 | 30.0 | 21.9 | 21.4 | 21.5 | 27.3 | 41.4 |
| 32          | 61.6 | 37.0 | 27.8 | 26.8 | 28.8 | 38.5 | 62.2 |
| 48          | 60.7 | 38.4 | 31.2 | 32.0 | 34.7 | 48.6 | 82.1 |
| 64          | 58.4 | 37.9 | 31.9 | 32.4 | 35.9 | 53.3 | 90.3 |
"""
TILE_ROWS = 16
"""Rows of a decode tile that products of 16 bits fill."""
MAX_PARTS = 4
"""Parts of the query heads that share a kv head, at most. Each of them reads its keys."""


def choose_short_rows(
    group_size: int,
    decode: Tiles,
    numbers: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Return the rows of a decode request, at most; 0 if the rows of a token fit no decode tile.

    Args:
        group_size: query heads per kv head, which are the rows of a token.
        decode: tiles of decodes, as `choose_tiles` returns them.
        numbers: elements of a row's query and of its result, each rounded up to a power of two.
        dtype: of the queries.
        device: where the kernels run.

    Example:
        With 64 heads per kv head, latents of 576 and 512 in bfloat16 have 64 rows on a chip with
        160 KiB of shared memory. With 99 KiB the kernels for requests of any rows compute them.
    """
    rows = max(decode.block_m, next_power_of_2(group_size))
    if rows > MOST_ROWS:
        return 0
    if not INTERPRETED:
        is_large = find_shared_memory(device) >= SHARED_MEMORY
        if rows * numbers > MOST_NUMBERS[is_large, dtype == torch.float32]:
            return 0
    return rows


def limit_stages(
    small_batch: Tiles,
    decode: Tiles,
    rows: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tiles:
    """Return the tiles of decodes in a small batch: with two KV tiles in flight, if these fit.

    Args:
        small_batch, decode: as `choose_tiles` returns them. They may differ in stages.
        rows: of a decode tile.
        sizes: elements of a query and of a value, each rounded up to a power of two.
        dtype, device: as in `choose_short_rows`.

    Example:
        64 rows of 256 and tiles of 64 keys in bfloat16: 32 KiB of queries, 8 of weights and 64 per
        KV tile. Two of these are 168 KiB, and an A100 has 163.
    """
    if small_batch == decode or INTERPRETED:
        return small_batch
    size, value_size = sizes
    of_rows = rows * (size + small_batch.block_n)
    of_keys = 2 * small_batch.block_n * (size + value_size)
    taken = (of_rows + of_keys) * dtype.itemsize
    return small_batch if taken <= find_shared_memory(device) else decode


def estimate_shared_memory(key: TileKey, tiles: Tiles) -> int:
    """Return the bytes of shared memory that a program with these tiles takes, at least.

    These are the KV tiles that are in flight, and queries or weights: a prefill may keep one of
    them in registers. Compiled for sm_86 and sm_90 with triton 3.7, 50 decodes and prefills take at
    least that.

    Example:
        64 rows of 256 and tiles of 64 keys with 5 stages in 16 bits: 32 KiB of queries, and 128 of
        KV tiles.
    """
    rows = key.rows or tiles.block_m
    stages = tiles.num_stages - 1
    in_flight = stages // 2 if key.is_paged else stages
    form = FORMATS[key.cache_format]
    stored = key.query_bytes if form.dtype is None else form.dtype.itemsize
    numbers = tiles.block_n * (key.head_size + key.value_size)
    of_keys = in_flight * numbers * stored // form.codes_per_element
    return rows * max(key.head_size, tiles.block_n) * key.query_bytes + of_keys


class ShortSplits(NamedTuple):
    """How few decodes are divided.

    Args:
        splits: programs per request, kv head and part; 0 for batches that are not few decodes.
        parts: parts of the query heads that share a kv head, each with programs of its own.
    """

    splits: int
    parts: int


def split_short_decodes(
    num_reqs: int,
    kv_heads: int,
    num_tiles: int,
    block_n: int,
    processors: int,
    resident: int,
    thresholds: Thresholds,
    numbers: int,
) -> int:
    """Return the programs per request and kv head of few decodes; 0 for others.

    Their kernel is `kernels/portable/short_decode.py`.

    Each multiprocessor gets one program at most, with the tiles of a small batch, and the KV tiles
    of a request are divided evenly among its programs, or among fewer if their results would take
    longer to combine (`count_time`). Of all tiles, stages and splits of this kernel that
    were swept over nine batches (H200, triton 3.6, bfloat16, blocks of 16, cold L2, medians of 21)
    as many programs as fit are within 2 % of the fastest for all but 2 over 8,192 keys. Query heads
    / kv heads of 128, times in us:

    | requests x keys | heads     | splits x tiles | this | stream-K | FlashAttention-3 |
    |-----------------|-----------|---------------:|-----:|---------:|-----------------:|
    | 1 x 512         | 32/8      | 4 x 1          | 10.9 | 12.1     | 17.7             |
    | 4 x 1,200       | 16/2      | 10 x 1         | 13.0 | 23.2     | 17.8             |
    | 6 x 1,500       | 16/4, 64  | 4 x 3          | 13.4 | 16.6     | 16.2             |
    | 3 x 700         | 32/8      | 3 x 2          | 13.7 | 22.2     | 18.5             |
    | 1 x 4,096       | 32/8      | 16 x 2         | 16.2 | 20.0     | 21.4             |
    | 4 x 2,500       | 16/2, 256 | 14 x 3         | 21.3 | 35.8     | 21.7             |
    | 2 x 8,192       | 32/2      | 32 x 2         | 23.4 | 44.4     | 22.4             |
    | 12 x 3,000      | 32/2      | 5 x 5          | 23.7 | 42.1     | 28.0             |
    | 16 x 5,000      | 32/4      | 2 x 20         | 56.8 | 61.5     | 62.0             |

    (1 x 512: one program per tile of 64 keys, in place of stream-K.) With two programs per
    multiprocessor and 3 stages the last two take 28.1 and 58.0.

    Stream-K divides the keys of ragged requests evenly, this does not. One of n requests exceeds
    the mean of all by (n - 1) / n of its own tiles, at most. That bounds the tiles per program: 2
    requests over 10,476 keys with 8 kv heads of 256 have 21, and take 58.5 us (stream-K 67.8).
    Where two programs fit a multiprocessor, SHORT_TILES remains, because the one batch that was
    measured was slower: with 8 kv heads of 64, 5 requests over up to 9,381 keys, 5,137 on average,
    have 25, and take 37.7 us (stream-K 32.0, and 30.6 with 2 programs per multiprocessor, of 13
    tiles). One request, and requests of one length, were not measured there.

    If a pair of a request and a kv head has one program alone, its keys are those of a stream-K
    segment at most, which stream-K would not divide either. There may be as many pairs then as the
    chip runs programs at once. With 8 kv heads of 64, 17 requests over up to 301 keys take 12.3 us
    (stream-K 18.4), and 33 over 409 take 18.5 (19.9). A program that waits for another one to end
    takes longer: 144 programs of one tile with heads of 128, of which one fits a multiprocessor,
    take 16.5 us, and 13.7 with 3 stages, of which several do.

    Args:
        num_reqs, kv_heads: requests, and kv heads.
        num_tiles: KV tiles of a request, at most.
        block_n: keys of a KV tile.
        processors: multiprocessors of the chip.
        resident: programs with the tiles of a small batch that the chip runs at once.
        thresholds: limits between this kernel and stream-K.
        numbers: of a partial result: padded rows of a request times elements of a value.
    """
    tiles, pairs = max(num_tiles, 1), num_reqs * kv_heads
    programs = processors // pairs
    if programs <= 1:
        most = max(1, thresholds.min_segment // block_n)
        return int(tiles <= most and pairs <= resident)
    split_tiles = -(-tiles // programs)
    most = thresholds.short_tiles
    if resident == processors:
        most = _most_split_tiles(num_reqs, most)
    if split_tiles > most:
        return 0
    best = math.isqrt(int(_of_result(numbers) * tiles))
    return min(
        (
            -(-tiles // max(split_tiles, length))
            for length in (split_tiles, best, best + 1)
        ),
        key=lambda splits: count_time(tiles, splits, numbers),
    )


def _most_split_tiles(num_reqs: int, short_tiles: int) -> int:
    """Return the KV tiles per program of few decodes, at most: see SHORT_TILES.

    Example:
        Two requests: 40, three: 30, four: 26, 16: 21. One request, which exceeds no mean: 40 too,
        since longer splits were not measured.
    """
    reqs = max(2, num_reqs)
    return short_tiles * reqs // (reqs - 1)


def count_time(tiles: int, splits: int, numbers: int) -> float:
    """Return what a request takes that has programs of its own, in times of a KV tile.

    A program walks over its tiles, and the last one combines the results of all.

    Args:
        tiles: KV tiles of the request.
        splits: its programs.
        numbers: as in `split_short_decodes`.

    Example:
        128 tiles and results of 64 rows of 128: 17.3 with 16 programs of 8 tiles each, whose
        results take as long as 9.3 tiles. With 128 programs of one tile 75.2.
    """
    combined = splits * _of_result(numbers) if splits > 1 else 0.0
    return -(-tiles // splits) + combined


def _of_result(numbers: int) -> float:
    """Return what one more partial result takes, in times of a KV tile."""
    return COMBINED_SHARE + COMBINED_NUMBERS * numbers / 1024


def count_parts(group_size: int) -> int:
    """Return into how many equal parts of at most TILE_ROWS heads a group is divided, or 1.

    Example:
        48 heads: 3 parts of 16. 40: 4 of 10. 17, a prime: 1.
    """
    for parts in range(2, MAX_PARTS + 1):
        if group_size % parts == 0 and TILE_ROWS < group_size <= parts * TILE_ROWS:
            return parts
    return 1
