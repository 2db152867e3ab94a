"""Tuning constants of latent attention: tiles, programs per SM and partition, per chip.

None of these numbers is measured yet: `tests/gpu/latent_times.py` times candidates. Compiled for
latents of 512 + 64 elements with triton 3.7, the loops over these tiles spill no register.
docs/kernel_notes.md has registers and shared memory of each, and of tiles that spill.
"""

from typing import NamedTuple

import torch

from ....runtime.chip import find_shared_memory
from ....runtime.launcher import INTERPRETED
from ...fp8 import has_native_fp8
from ..latent import Combination
from .tuning import SHARED_MEMORY, Tiles


class LatentTiles(NamedTuple):
    """The tiles of a launch, and how many of its programs share a multiprocessor."""

    tiles: Tiles
    programs: int


NARROW = LatentTiles(Tiles(16, 32, 4, 3), 2)
"""Up to 16 rows, and any number of rows on chips that are not in WIDE."""
WIDE = {
    9: LatentTiles(Tiles(64, 64, 8, 3), 1),
    10: LatentTiles(Tiles(32, 32, 8, 3), 1),
}
"""More rows, by the major compute capability of the chip."""
FP8 = LatentTiles(Tiles(16, 32, 8, 3), 1)
"""FP8 latents. With more rows they spill in the loop."""
BIT_FP8 = LatentTiles(Tiles(16, 16, 4, 3), 2)
"""FP8 latents on a chip that does not decode them by an instruction."""
FLOAT32 = LatentTiles(Tiles(16, 16, 8, 1), 1)
IN_THE_INTERPRETER = LatentTiles(Tiles(16, 32, 4, 1), 1)

MAX_WIDTH = 512 + 64
"""Elements of a latent and of a rope key, each rounded up to a power of two, at most: those for
which tiles were compiled."""
MAX_COLUMNS = 8
"""Query tiles of a request that are computed side by side, at most."""
MIN_KEYS = 32 if INTERPRETED else 128
"""Keys of a segment, at least."""
FEW_ROWS = 0 if INTERPRETED else 1024
"""Rows of split query tiles, at most, of which a program of the second launch combines ONE_ROW."""
ONE_ROW, SEVERAL_ROWS = Combination(1, 128, 16), Combination(8, 128, 2)
COMBINE_TILES = Tiles(0, 0, 1, 1)
"""One warp: each thread has four channels of all rows and splits that are loaded at once."""


def choose_latent_tiles(
    rows: int,
    dtype: torch.dtype,
    is_fp8: bool,
    loads_scores: bool,
    device: torch.device,
) -> LatentTiles:
    """Return the tiles of requests of at most so many rows.

    Args:
        dtype: of the queries.
        is_fp8: whether the latents are FP8 numbers.
        loads_scores: whether a tree mask or a position bias is loaded for each score. With 64 rows
            that takes 241 KiB of shared memory for sm_90, which has 227.
        device: where the kernel runs.
    """
    if INTERPRETED:
        return IN_THE_INTERPRETER
    narrow = NARROW
    if dtype == torch.float32:
        narrow = FLOAT32
    elif is_fp8:
        narrow = FP8 if has_native_fp8(device) else BIT_FP8
    elif rows > narrow.tiles.block_m and not loads_scores:
        major = torch.cuda.get_device_properties(device).major
        narrow = WIDE.get(major, narrow)
    # one program fits an SM with less
    return (
        narrow
        if find_shared_memory(device) >= SHARED_MEMORY
        else narrow._replace(programs=1)
    )


def choose_combination(rows: int) -> Combination:
    """Return the constants of the second launch.

    Args:
        rows: rows of all split query tiles, at most.
    """
    return ONE_ROW if rows <= FEW_ROWS else SEVERAL_ROWS
