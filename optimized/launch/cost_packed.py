"""Choice between the query tiles of Hopper's prefill kernel for groups that do not divide 64."""

from .cost_constants import WARPGROUP_ROWS


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
