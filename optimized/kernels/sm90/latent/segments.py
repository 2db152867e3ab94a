"""How many segments divide a batch of latent decodes, on the host.

A shorter segment ends sooner, and there are more partial results to write and to combine. Times in
us on an H200 with segments of 2, 4 and 8 KV tiles (64 keys), one token per request, bfloat16, cold
L2, medians of 9:

| requests, heads, keys | 2    | 4    | 8    |
|-----------------------|-----:|-----:|-----:|
| 1 x 64, 2,048         | 18.6 | 21.4 | 27.5 |
| 4 x 128, 2,048        | 25.1 | 23.4 | 28.0 |
| 4 x 64, 4,096         | 29.0 | 24.9 | 29.5 |
| 1 x 64, 8,192         | 25.2 | 23.8 | 27.5 |
| 1 x 128, 8,192        | 30.8 | 25.2 | 28.6 |
| 1 x 64, 32,768        |      | 46.2 | 36.5 |
"""

from ..common.stream_k import MIN_TILES
from .config import BLOCK_M

LENGTHS = MIN_TILES.value, 2 * MIN_TILES.value, 4 * MIN_TILES.value
"""KV tiles of a segment, at least, that are compared."""
TILE_US = 2.1
"""Of each KV tile of a segment."""
SPLIT_US = 0.1
"""Of each partial result of a row tile: the combination reads them one after the other."""
PARTIAL_US = 0.11
"""Of each partial result of BLOCK_M rows, in all of the batch."""


def choose_segments(
    reqs: int, row_tiles: int, kv_tiles: int, rows: int, most: int
) -> int:
    """Return the number of segments with the least estimated time.

    Args:
        reqs: requests.
        row_tiles, kv_tiles: of a request, at most.
        rows: rows of a row tile, at most.
        most: segments, at most.
    """
    total = reqs * row_tiles * max(1, kv_tiles)
    found = []
    for length in LENGTHS:
        segments = max(1, min(total // length, most))
        tiles = max(length, -(-total // segments))
        time = tiles * TILE_US
        if tiles < kv_tiles:
            time += -(-kv_tiles // tiles) * SPLIT_US
            time += segments * rows / BLOCK_M.value * PARTIAL_US
        found.append((time, -segments))
    return -min(found)[1]
