"""Cascade attention: a prefix that all requests share is read once.

Requests that begin alike (the same system prompt, the same document) have the same first blocks in
their rows of the block table. Attention request by request reads those keys again for each. But
every new token comes after the whole prefix, so it attends to all of the prefix's keys. For the
prefix, all queries of the batch are therefore one request without a causal mask. Its result and
the result over the rest of each sequence are partial results over disjoint sets of keys, and are
combined by their log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.cache_formats import head_size_of
from ...contract.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    Query,
    StartLoc,
    TokenCounts,
    ValueCache,
)
from ...validation import validated
from ...validation.cascade import check_cascade, check_cascade_choice
from .merge_states import merge_attn_states
from .paged import paged_attention


@validated(check_cascade)
def cascade_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    common_prefix_len: int,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return attention of each new token over its sequence, the shared prefix read once.

    The result is that of `paged_attention`, up to rounding.

    Args:
        query: [tokens, query_heads, head_size].
        key_cache: [num_blocks, block_size, kv_heads, head_size].
        value_cache: [num_blocks, block_size, kv_heads, value_head_size].
        block_table: [reqs, max_blocks]. The prefix is read through row 0. The other rows begin
            with the same block ids, which are not read.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence, prefix and new ones included.
        max_query_len: At least the number of queries of every request. A captured graph keeps
            this number and the next one, so they must hold for every replay.
        max_seq_len: At least every entry of `seq_lens`.
        common_prefix_len: Keys that all sequences begin with, a multiple of the block size. Every
            new token comes after them. Requests without new tokens need not share them. 0 means
            no shared prefix.
        scale, out, lse: As in `paged_attention`.
        compute_dtype: The dtype of all arithmetic, and of both partial results.
        options: Those that do not depend on distances: `causal`, `tree_mask`, `logits_soft_cap`,
            `sinks` (counted once, with the rest), `k_scale` and `v_scale`.

    Returns:
        `out`.

    Raises:
        NotImplementedError: An option depends on distances (the queries of different requests
            have different positions, and for the prefix they are one request), or is not taken.
        ValueError: The prefix is not whole blocks, is not shared by the rows, or reaches into the
            new tokens. Also, as IndexError and TypeError: what `paged_attention` raises.

    Source:
        Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade Inference", FlashInfer, 2024.

    Example:
        Two sequences of three tokens share block 2; their last tokens are in blocks 0 and 1.

        >>> cascade_attention(
        ...     query=torch.ones(2, 1, 1),
        ...     key_cache=torch.ones(3, 2, 1, 1),
        ...     value_cache=torch.arange(6.0).view(3, 2, 1, 1),
        ...     block_table=torch.tensor([[2, 0], [2, 1]], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        ...     seq_lens=torch.tensor([3, 3], dtype=torch.int32),
        ...     max_query_len=1,
        ...     max_seq_len=3,
        ...     common_prefix_len=2,
        ... ).flatten()
        tensor([3.0000, 3.6667])
    """
    caches = (key_cache, value_cache)
    attend = partial(
        paged_attention, query, *caches, scale=scale, compute_dtype=compute_dtype
    )
    batch = (query_start_loc, seq_lens, max_query_len, max_seq_len)
    if not common_prefix_len or not len(block_table):
        return attend(block_table, *batch, out=out, lse=lse, options=options)
    tokens, query_heads, _ = query.shape
    if out is None:
        out = query.new_empty(tokens, query_heads, head_size_of(value_cache))
    # partial results in the dtype of the arithmetic, so that the result is rounded once
    partials = out.new_empty(2, *out.shape, dtype=compute_dtype)
    lse_dtype = torch.promote_types(compute_dtype, torch.float32)
    lses = out.new_empty(2, query_heads, tokens, dtype=lse_dtype)
    prefix_blocks = common_prefix_len // key_cache.shape[1]
    # step: attend to the shared prefix, all queries as one request
    # rows past the last request belong to no request
    start_and_end = torch.cat([query_start_loc[:1], query_start_loc[-1:]])
    attend(
        block_table[:1, :prefix_blocks],
        start_and_end,
        seq_lens.new_full((1,), common_prefix_len),
        max_query_len=tokens,
        max_seq_len=common_prefix_len,
        out=partials[0],
        lse=lses[0],
        options=replace(options, causal=False, tree_mask=None, sinks=None),
    )
    # step: attend to the rest of each sequence
    # a request without new tokens may be shorter than the prefix
    rest_lens = (seq_lens - common_prefix_len).clamp(min=0)
    attend(
        block_table[:, prefix_blocks:],
        query_start_loc,
        rest_lens,
        max_query_len,
        max_seq_len=max(max_seq_len - common_prefix_len, 0),
        out=partials[1],
        lse=lses[1],
        options=options,
    )
    # step: merge both results by their log-sum-exp
    return merge_attn_states(
        partials[0], lses[0], partials[1], lses[1], output=out, output_lse=lse
    )


MIN_PREFIX_LEN, MIN_REQS = 256, 8
"""Shorter prefixes and smaller batches never use cascade attention (vLLM's constants)."""


TILE = 128
"""Rows of a query tile, and keys of a key tile, in the cost model (vLLM's constant)."""


@typed
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
