"""The decision whether cascade attention is faster than ordinary attention."""

from collections.abc import Sequence

from ...validation.cascade import check_cascade_choice

MIN_PREFIX_LEN, MIN_REQS = 256, 8
"""Shorter prefixes and smaller batches never use cascade attention (vLLM's constants)."""

TILE = 128
"""Rows of a query tile, and keys of a key tile, in the cost model (vLLM's constant)."""


def use_cascade_attention(
    common_prefix_len: int,
    query_lens: Sequence[int],
    num_query_heads: int,
    num_kv_heads: int,
    use_alibi: bool,
    use_sliding_window: bool,
    use_local_attention: bool,
    num_sms: int,
    dcp_world_size: int = 1,
) -> bool:
    """Return whether reading the shared prefix once is expected to be faster.

    False for a short prefix, for few requests, and for options that `cascade_attention` does not
    take. Otherwise True if a request has several new tokens or the heads are not grouped. For
    decodes with grouped heads, the two launches are compared by a cost in key tiles per SM:

    - The cascade runs one program per query head and query tile. Each reads the whole prefix, so
      the cost is the number of waves times the number of key tiles.
    - Split-KV divides the key tiles of all requests and KV heads evenly among the SMs.

    Args:
        common_prefix_len: keys that all requests share.
        query_lens: [reqs] new tokens of each request.
        num_query_heads, num_kv_heads: heads of the layer.
        use_alibi, use_sliding_window, use_local_attention: whether the layer has ALiBi slopes, a
            sliding window, or attention in chunks.
        num_sms: streaming multiprocessors of the device.
        dcp_world_size: ranks among which a sequence's keys are distributed.

    Returns:
        Whether to call `cascade_attention`. Both give the same result.

    Raises:
        ValueError: a count is negative or a size is below 1.

    Source:
        vLLM's function of that name, up to 0.25. It is a rough model: tiles of other sizes and
        the memory bandwidth are not part of it.

    Example:
        16 decodes, 8 query heads on 2 KV heads, 512 shared keys: 4 key tiles. On 4 SMs the cascade
        takes 2 waves of 4 tiles, so 8. Split-KV has 16 x 2 x 4 = 128 tiles, 32 per SM.

        >>> use_cascade_attention(
        ...     common_prefix_len=512,
        ...     query_lens=[1] * 16,
        ...     num_query_heads=8,
        ...     num_kv_heads=2,
        ...     use_alibi=False,
        ...     use_sliding_window=False,
        ...     use_local_attention=False,
        ...     num_sms=4,
        ... )
        True
    """
    check_cascade_choice(
        common_prefix_len,
        query_lens,
        num_query_heads,
        num_kv_heads,
        num_sms,
        dcp_world_size,
    )
    num_reqs = len(query_lens)
    if common_prefix_len < MIN_PREFIX_LEN or num_reqs < MIN_REQS:
        return False
    if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1:
        return False
    group = num_query_heads // num_kv_heads
    if group == 1 or any(query_len != 1 for query_len in query_lens):
        return True
    key_tiles = _tiles(common_prefix_len)
    programs = num_query_heads * _tiles(num_reqs)
    cascade = -(-programs // num_sms) * key_tiles
    split_tiles = num_reqs * num_kv_heads * _tiles(group) * key_tiles
    return cascade < -(-split_tiles // num_sms)


def _tiles(rows: int) -> int:
    return -(-rows // TILE)
