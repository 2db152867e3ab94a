"""How many programs the requests of few decodes have, and which query heads a program has."""

import math
from typing import NamedTuple

from .tuning import Thresholds

COMBINED_SHARE, COMBINED_NUMBERS = 0.1, 0.06
"""What one more partial result takes that a program combines, in times of a KV tile: whatever its
size, and per 1,024 numbers.

One request over 16,384 keys of one KV head of 128, whose tiles have 128 keys (H200, bfloat16, cold
L2, medians of 9), in us by splits. A tile takes 1.2 to 1.5 us, and 128 results take 30 to 75.

| query heads | 4    | 8    | 16   | 24   | 32   | 64   | 128  | FlashAttention-3 over 4,096 |
|-------------|-----:|-----:|-----:|-----:|-----:|-----:|-----:|----------------------------:|
| 16          | 49.2 | 30.0 | 21.9 | 21.4 | 21.5 | 27.3 | 41.4 |                             |
| 32          | 61.6 | 37.0 | 27.8 | 26.8 | 28.8 | 38.5 | 62.2 |                             |
| 48          | 60.7 | 38.4 | 31.2 | 32.0 | 34.7 | 48.6 | 82.1 | 17.2                        |
| 64          | 58.4 | 37.9 | 31.9 | 32.4 | 35.9 | 53.3 | 90.3 |                             |
"""
TILE_ROWS = 16
"""Rows of a decode tile that products of 16 bits fill."""
MAX_PARTS = 4
"""Parts of the query heads that share a kv head, at most. Each of them reads its keys."""


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
