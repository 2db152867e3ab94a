"""The width of Hopper's prefill tiles: rows of one consumer warpgroup, or of all.

Narrow tiles begin and end sooner, there are more of them, and a request's last one has fewer rows
without a token. But each reads its keys itself. With few KV tiles per multiprocessor they win:
time with one warpgroup divided by that with all, bfloat16, cold L2, medians of 9 on an H200.

| batch           | 12 heads of 64 | 32 heads of 96 | 32:8 of 128 | 64:8 of 64 | 16:8 of 256 |
|-----------------|---------------:|---------------:|------------:|-----------:|------------:|
| 1 x 128         | 0.67           | 0.66           | 0.68        | 0.70       | 0.77        |
| 1 x 333         | 0.65           | 0.77           | 0.79        | 0.76       | 0.85        |
| 12 of 60 to 400 | 0.82           | 0.86           | 0.92        | 0.90       | 0.93        |
| 1 x 2,048       | 0.88           | 1.19           | 1.18        | 1.28       | 0.93        |
| 4 x 1,024       | 0.86           | 1.06           | 1.17        | 1.22       | 1.05        |
| 1 x 256 on 8k   | 0.53           | 0.60           | 0.71        | 0.99       | 0.66        |
| 16 x 64 on 4k   | 0.61           | 0.77           | 1.21        | 1.28       | 1.18        |

`takes_less_time` estimates both times. Over 87 batches with heads of 64 to 256, some with windows,
the chosen width took 1.006 times the better one's time in the geometric mean and 1.19 at most, and
wide tiles alone 1.18 in the mean (tests/kernels/test_narrow_sm90.py).
"""

import math
from typing import NamedTuple

from ..common.config import WARPGROUP_M, Sm90Config

NARROW_SHARES = {2: 0.6, 3: 0.45}
"""Time of a KV tile with one warpgroup, divided by that with so many."""
PACKED_SHARE = 0.9
"""Of the estimated time of packed tiles, below which narrow tiles of one head are chosen. Packed
tiles have all query heads of a KV head, so they read its keys once. Over 48 batches with groups of
3 to 9, narrow tiles took 0.53 to 1.39 of the time of packed ones."""
WIDE_START = 4.0
"""What a launch of wide tiles takes besides, in KV tiles of a wide query tile."""
WIDE_ENDS, NARROW_ENDS = 2.0, 1.0
"""The begin and the end of a query tile, in the same unit."""


class PrefillBounds(NamedTuple):
    """What the host knows of a prefill.

    Args:
        reqs: number of requests.
        tokens: number of their tokens.
        max_query_len: tokens of a request, at most.
        max_key_len: keys of a request, at most.
    """

    reqs: int
    tokens: int
    max_query_len: int
    max_key_len: int


class _Items(NamedTuple):
    per_processor: float
    most_tiles: int
    least_tiles: int


def has_narrow_tile(config: Sm90Config) -> bool:
    """Return whether small batches get query tiles of one warpgroup.

    Tiles that begin within a token do not: they are not measured.
    """
    is_whole = WARPGROUP_M.value % config.GROUP == 0 and config.ROWS_PER_TOKEN == 1
    return is_whole and config.CONSUMERS > 1


def takes_less_time(
    config: Sm90Config,
    packed: Sm90Config | None,
    heads: int,
    bounds: PrefillBounds,
    processors: int,
) -> bool:
    """Return whether a prefill takes less time with tiles of one warpgroup than with all.

    Args:
        config: the constants of the tiles with all warpgroups.
        packed: Optional. The constants of tiles with all query heads of a KV head, if the batch
            would have those.
        heads: number of query heads.
        bounds: of the batch.
        processors: multiprocessors of the chip.
    """
    other = config if packed is None else packed
    wide = _count_items(other, heads, bounds, processors, other.CONSUMERS)
    narrow = _count_items(config, heads, bounds, processors, 1)
    most = WIDE_START + _estimate(wide, 1.0, WIDE_ENDS)
    if packed is not None:
        most *= PACKED_SHARE
    return _estimate(narrow, NARROW_SHARES[config.CONSUMERS], NARROW_ENDS) < most


def _count_items(
    config: Sm90Config,
    heads: int,
    bounds: PrefillBounds,
    processors: int,
    warpgroups: int,
) -> _Items:
    """Return the query tiles per multiprocessor, and the KV tiles of the longest and shortest."""
    reqs, tokens, query_len, key_len = bounds
    tile_tokens = warpgroups * (WARPGROUP_M.value // config.GROUP)
    # a request's last tile is half full on average
    query_tiles = min(
        reqs * -(-query_len // tile_tokens), tokens / tile_tokens + reqs / 2
    )
    least = key_len - max(0, query_len - tile_tokens) if config.CAUSAL else key_len
    if reach := config.WINDOW or config.CHUNK_SIZE:
        reach = (reach if config.CAUSAL else 2 * reach) + tile_tokens
        key_len, least = min(key_len, reach), min(least, reach)
    return _Items(
        query_tiles * heads / config.GROUP / processors,
        max(1, -(-key_len // config.BLOCK_N)),
        max(1, -(-least // config.BLOCK_N)),
    )


def _estimate(items: _Items, tile: float, ends: float) -> float:
    """Return the time of the busiest multiprocessor. The longest query tiles come first.

    Args:
        items: the query tiles.
        tile: the time of a KV tile.
        ends: what a query tile takes besides.
    """
    count, most, least = items
    in_last_round = math.ceil(count) - count
    average = (most + least) / 2
    rounds = count * (average * tile + ends) + in_last_round * (least * tile + ends)
    return max(most * tile + ends, rounds)
