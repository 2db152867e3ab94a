"""Decode tiles of many rows: how many rows, and KV tiles in flight, fit a chip's shared memory.

A decode tile has all rows of a token, which are the query heads that share a kv head. The tiles of
tuning.py are for 16 rows. If a token has more, its queries and results take more shared memory, and
a launch that needs more than the chip has is an error.
"""

import torch

from .....contract.cache_formats import FORMATS
from ....runtime.chip import find_shared_memory
from ....runtime.launcher import INTERPRETED, next_power_of_2
from ..tables.kernel_tables import TileKey
from .tuning import SHARED_MEMORY, Tiles

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
