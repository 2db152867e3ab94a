"""Cost of Hopper's prefill kernel, and the choice between its query tiles.

For most groups that do not divide WARPGROUP_ROWS there are two: of one query head, and of all query
heads of a KV head.
"""

from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.cost_prefill import PrefillRates, estimate_prefill
from ..common.rates import FLOP_PER_US, TILE_ROWS, WARPGROUP_ROWS

PREFILL_US = 13.0
"""What a decode launch with a prefill launch takes besides what is counted: launches, first
accesses, write-back of a dirty L2 cache, and tails."""
ROUND_US = 6.3
"""The begin and the end of a work item: 64 requests of 6 tokens over 1,024 keys have four per
multiprocessor, and take 100 us."""
PRODUCTS_ROUND_US = 3.0
"""What overlaps with nothing in each further work item of Hopper's prefill kernel, if its products
take longer than its loads: the last softmax and the output. 16 requests of 128 tokens over 4,096
keys have four per multiprocessor and take 239 us, of which the products are 198. 40 of 44 tokens
over 1,411 with heads of 64 have five, and take 127, of which the products are 83. Without the term
both were underestimated, by 9 and 19 %. These two would need 6 to 7 us, and encoders with five and
nine 1.3 to 2.4: values of 2 and 3 have the least error over 57 batches."""
WINDOW_ROUND_US = 2.0
"""What a window adds to a work item of that kernel: masks at both ends, and one more KV tile if it
begins within one. With a window of 1,024 and one work item per multiprocessor, 6 requests of 7
tokens over 4,199 keys take 35.4 us. With two, 37 of 4 over 2,616 take 62.4, and 24 of 8 over 8,192
take 65.3. Without the term they were estimated to take 31.9, 58.6 and 58.7."""


def estimate_hopper_prefill(
    layer: Layer, batch: BatchBounds, has_packed: bool, is_cut: bool = False
) -> float:
    """Return the microseconds of a prefill launch.

    Args:
        has_packed: whether there are query tiles of all query heads of a KV head for short
            requests, although the group does not divide WARPGROUP_ROWS.
        is_cut: whether query tiles have all query heads of a KV head, and begin within a token.
    """
    size = 64 if layer.numbers <= 128 else 128
    rows, group_size = TILE_ROWS[size], layer.group_size
    rates = PrefillRates(
        rows,
        FLOP_PER_US[size],
        PREFILL_US,
        ROUND_US,
        PRODUCTS_ROUND_US,
        WINDOW_ROUND_US,
    )
    heads = layer.kv_heads
    if has_packed and packs_heads(group_size, batch.max_query_len, rows):
        tiles = -(-batch.max_query_len // packed_tokens(group_size, rows))
    elif WARPGROUP_ROWS % group_size and not is_cut:
        # a tile has the rows of one query head
        tiles, heads = -(-batch.max_query_len // rows), heads * group_size
    else:
        tiles = -(-batch.max_query_len * group_size // rows)
    return estimate_prefill(layer, batch, rates, tiles, heads)


def packed_tokens(group_size: int, tile_rows: int) -> int:
    """Return the tokens of a query tile with all query heads of a KV head.

    Args:
        group_size: query heads per KV head, at most WARPGROUP_ROWS.
        tile_rows: rows of a query tile, some of which are unused.

    Example:
        128 rows and groups of 5: 24, since each of two warpgroups has 12, which are 60 rows.
    """
    return tile_rows // WARPGROUP_ROWS * (WARPGROUP_ROWS // group_size)


def packs_heads(group_size: int, max_query_len: int, tile_rows: int) -> bool:
    """Return whether a request has as few query tiles, or fewer, with all query heads in a tile.

    With as many, the tiles of whole tokens are better: those of a prompt's first tokens have fewer
    keys, and the rows at a request's end leave fewer unused.

    Args:
        group_size: query heads per KV head, at most WARPGROUP_ROWS.
        max_query_len: new tokens of the request.
        tile_rows: rows of a query tile.

    Example:
        128 rows and groups of 5: 37 tokens have 2 tiles per KV head, or 5 with one query head each.
        120 have 5, or 5. 121 have 6, or 5.
    """
    packed = -(-max_query_len // packed_tokens(group_size, tile_rows))
    return packed <= group_size * -(-max_query_len // tile_rows)
