"""Cost of the portable kernels: estimated times, and the query tile of an append.

The constants are of an H200, as those in runtime/cost_constants.py.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from ....runtime.cost_constants import (
    DECODE_BYTES_PER_US,
    L2_BYTES_PER_US,
    MAX_SPLIT_TOKENS,
    MIN_SPLIT_KEYS,
    TIE_SHARE,
)
from ....runtime.cost_layer import BatchBounds, Layer, visible_keys
from ....runtime.cost_prefill import PrefillRates, estimate_prefill
from ....runtime.family import Estimate

FLOP_PER_US = {16: 0.7e6, 32: 1.1e6, 64: 1.8e6, 128: 3.2e6}
"""Operations of the portable kernels with tiles of so many rows: 16 requests of 16 tokens over
16,384 keys take 789 us with 16 rows, one of 1,024 over 40,960 takes 4,669 with 32 and 1,680 with
128, and 8 of 32 over 8,192 take 174 with 64."""
SMALL_HEAD_SHARE = 0.76
"""Share of these rates with heads of 64, which have twice as many scores per operation: an encoder
of 10 requests of 777 tokens and 12 heads takes 101 us with 128 rows."""
SPLIT_US, PREFILL_US = 40.0, 35.0
"""What an append, and a decode launch with a prefill launch, take besides what is counted:
launches, first accesses, write-back of a dirty L2 cache, tails, and the combinations of the
first."""
ROUND_US = 4.0
"""The begin and the end of a work item of a prefill: 64 requests of 6 tokens over 1,024 keys have
four per multiprocessor."""


@dataclass(frozen=True)
class Rates:
    """Rates of the portable kernels on a chip, as the constants of the same names describe them.

    Args:
        flop_per_us: operations per microsecond of one SM, with tiles of 16, 32, 64 and 128 rows.
        split_us, prefill_us: microseconds besides what is counted.
        prefill_share: rate of a prefill as a share of that of an append with as many rows.
    """

    flop_per_us: tuple[float, ...] = tuple(FLOP_PER_US.values())
    split_us: float = SPLIT_US
    prefill_us: float = PREFILL_US
    prefill_share: float = 1.0

    def flops(self, rows: int) -> float:
        """Return the operations per microsecond of one SM with tiles of so many rows."""
        return self.flop_per_us[tuple(FLOP_PER_US).index(rows)]


RATES = Rates()


def estimate_decode(layer: Layer, batch: BatchBounds) -> Estimate:
    """Return what the short requests of a batch add to the launch of its long ones."""
    short = batch.num_reqs - batch.num_long
    reads = short * layer.kv_heads * batch.max_key_len * layer.key_bytes
    return Estimate(reads / (DECODE_BYTES_PER_US * layer.processors))


@lru_cache(maxsize=1024)
def choose_row_tile(
    layer: Layer,
    batch: BatchBounds,
    row_tiles: tuple[int, ...],
    rates: Rates = RATES,
) -> int:
    """Return the rows of the query tiles with which an append is estimated to take least.

    Args:
        row_tiles: rows of each query tile, fewest first.
        rates: of the kernels.
    """
    return min(row_tiles, key=lambda rows: estimate_split(layer, batch, rows, rates))


def estimate_append(
    layer: Layer,
    batch: BatchBounds,
    row_tiles: tuple[int, ...],
    rates: Rates = RATES,
) -> Estimate:
    """Return what an append of all requests takes, and the rows of its query tiles.

    Args:
        row_tiles: rows of each query tile, fewest first.
        rates: of the kernels.
    """
    block_m = choose_row_tile(layer, batch, row_tiles, rates)
    if not may_be_split(batch):
        return Estimate(math.inf, block_m)
    time = estimate_split(layer, batch, block_m, rates)
    return Estimate(time / TIE_SHARE, block_m)


def may_be_split(batch: BatchBounds) -> bool:
    """Return whether a split of the keys is considered."""
    return (
        batch.max_query_len <= MAX_SPLIT_TOKENS and batch.max_key_len >= MIN_SPLIT_KEYS
    )


def estimate_split(
    layer: Layer, batch: BatchBounds, block_m: int, rates: Rates = RATES
) -> float:
    """Return the microseconds of the append kernel for all requests, with tiles of `block_m` rows.

    Every query tile is counted with the keys of its request, because the slowest program counts.
    """
    num_reqs, num_long = batch.num_reqs, batch.num_long
    rows = batch.max_query_len * layer.group_size
    tiles = num_long * -(-rows // block_m)
    tiles += (num_reqs - num_long) * -(-layer.group_size // block_m)
    keys = visible_keys(layer, batch)
    heads = layer.kv_heads
    products = 2 * tiles * heads * block_m * keys * layer.numbers
    reads = num_reqs * heads * keys * layer.key_bytes
    reads_again = (tiles - num_reqs) * heads * keys * layer.key_bytes
    processors = layer.processors
    rate = rates.flops(block_m) * processors
    if layer.numbers <= 128:
        rate *= SMALL_HEAD_SHARE
    return rates.split_us + max(
        products / rate,
        reads / (DECODE_BYTES_PER_US * processors)
        + reads_again / (L2_BYTES_PER_US * processors),
    )


def estimate_prefill_of_rows(
    layer: Layer, batch: BatchBounds, rows: int, rates: Rates = RATES
) -> Estimate:
    """Return what a prefill launch takes whose query tiles have so many rows."""
    flop_per_us = rates.flops(rows) * rates.prefill_share
    of_prefill = PrefillRates(rows, flop_per_us, rates.prefill_us, ROUND_US)
    tiles = -(-batch.max_query_len * layer.group_size // rows)
    return Estimate(estimate_prefill(layer, batch, of_prefill, tiles, layer.kv_heads))
