"""Rates of the kernels for Hopper chips, and the rows of their query tiles.

They are of an H200, as those in runtime/cost_constants.py.
"""

FLOP_PER_US = {64: 4.1e6, 128: 5.35e6}
"""Operations of Hopper's prefill kernel, by head size up to 64 and above: 1,024 tokens over 40,960
keys take 1,006 us, 512 over 32,768 take 422, and with head size 64 16 requests of 16 tokens over
8,192 keys take 123."""
TILE_ROWS = {64: 192, 128: 128}
"""Rows of a query tile of Hopper's kernels, by head size up to 64 and above."""
WARPGROUP_ROWS = 64
"""Rows of a query tile that one warpgroup computes."""
