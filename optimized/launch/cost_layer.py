"""What the cost model (cost_model.py) knows of a layer and of a batch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """What the estimates need to know of all calls with one signature.

    Args:
        group_size, kv_heads: query heads per kv head, and kv heads.
        numbers: elements of a key and a value of one head.
        key_bytes: bytes of a key and a value of one head.
        short_rows: rows of a request, at most, that fits a decode tile; 0 without a decode kernel.
        row_tiles: rows of each tile of the append kernel, fewest first.
        prefill_rows: rows of a tile of the portable prefill kernel.
        has_hopper: whether the prefill kernel of Hopper chips takes the calls.
        append_rows: rows of each query tile of Hopper's append kernel, fewest first. Empty if that
            kernel does not take the calls.
        packs_heads: whether Hopper's prefill kernel has query tiles of all query heads of a KV head
            for short requests, although the group does not divide WARPGROUP_ROWS.
        causal: whether queries attend to no later keys.
        max_visible_keys: Optional. Keys that a row attends to, at most. If None, all of them.
        processors: multiprocessors of the chip.
        converted_bytes: bytes per key of one head that are read and written before that prefill
            kernel, which takes no FP8 cache; 0 without a conversion.
    """

    group_size: int
    kv_heads: int
    numbers: int
    key_bytes: int
    short_rows: int
    row_tiles: tuple[int, ...]
    prefill_rows: int
    has_hopper: bool
    causal: bool
    max_visible_keys: int | None
    processors: int
    converted_bytes: int = 0
    append_rows: tuple[int, ...] = ()
    packs_heads: bool = False


def count_long(num_reqs: int, tokens: int, max_query_len: int) -> int:
    """Return how many requests are as long as the longest one, if the others have one token.

    Example:
        4 requests of 9 tokens, at most 3 each: 2 * 3 + 2 * 1 is 8, so the third is assumed long.
    """
    spare = tokens - num_reqs
    return max(1, min(num_reqs, -(-spare // max(1, max_query_len - 1))))


def visible_keys(layer: Layer, max_query_len: int, max_key_len: int) -> int:
    """Return the keys that the rows of one request attend to, at most."""
    if layer.max_visible_keys is None:
        return max_key_len
    return min(max_key_len, layer.max_visible_keys + max_query_len)
