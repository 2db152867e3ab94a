"""Time of a prefill: one program per query tile of the long requests.

A launch takes the longest of its products, its reads of memory and its reads of the L2 cache, plus
a constant. A prefill reads no key twice, but few query tiles leave most of the chip idle.
"""

from dataclasses import dataclass

from .cost_constants import (
    L2_BYTES_PER_US,
    PREFILL_BYTES_PER_US,
    PREFILL_PROGRAM_BYTES_PER_US,
)
from .cost_layer import BatchBounds, Layer, visible_keys


@dataclass(frozen=True)
class PrefillRates:
    """How fast a prefill kernel is.

    Args:
        rows: rows of a query tile.
        flop_per_us: operations per microsecond of one multiprocessor.
        launch_us: microseconds of a launch besides what is counted.
        round_us: begin and end of a work item.
        products_round_us: what overlaps with nothing in each further work item of a
            multiprocessor, if the products take longer than the loads.
        window_round_us: what a window adds to a work item.
    """

    rows: int
    flop_per_us: float
    launch_us: float
    round_us: float
    products_round_us: float = 0.0
    window_round_us: float = 0.0


def estimate_prefill(
    layer: Layer, batch: BatchBounds, rates: PrefillRates, tiles: int, heads: int
) -> float:
    """Return the microseconds of a prefill launch.

    A prefill of a whole prompt attends to half of its keys on average. As many requests as possible
    are assumed to be as long as the longest one, and the others to have one new token.

    Args:
        tiles: query tiles of a long request, per head.
        heads: heads that have query tiles of their own: KV heads, or query heads.
    """
    processors = layer.processors
    keys = visible_keys(layer, batch)
    if layer.causal:
        keys -= min(keys, batch.max_query_len) // 2
    num_long = batch.num_long
    items = num_long * tiles * heads
    # the last round of programs may leave multiprocessors idle
    rounds = -(-items // processors)
    products = 2 * rounds * rates.rows * keys * layer.numbers
    key_bytes, read_once = keys * layer.key_bytes, num_long * layer.kv_heads
    programs = processors if rounds == 1 else items / rounds
    reads_again = (items - read_once) * key_bytes / (L2_BYTES_PER_US * programs)
    reads = read_once * key_bytes / (PREFILL_BYTES_PER_US * programs)
    of_window = 0.0 if layer.max_visible_keys is None else rates.window_round_us
    of_round, of_products = rates.round_us, rates.products_round_us
    # the loads of the next work item overlap with the products of the last one
    return (
        rates.launch_us
        + of_window * rounds
        + max(
            products / rates.flop_per_us + of_round + of_products * (rounds - 1),
            reads + reads_again + of_round,
            # few programs do not reach the bandwidth of the memory
            max(reads, key_bytes / PREFILL_PROGRAM_BYTES_PER_US) + of_round * rounds,
        )
    )
