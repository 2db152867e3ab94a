"""Encoder attention: tokens attend to each other without a cache.

An encoder reads its whole input at once: every token sees every other, in both directions, and
nothing is kept for later. So keys and values lie one after another, request after request, and need
no block table. Queries and keys have starts of their own, and may differ in number: a decoder's
tokens may ask the tokens of an encoder.
"""

import torch

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.shapes import (
    LogSumExp,
    Output,
    Query,
    RaggedKey,
    RaggedValue,
    StartLoc,
)
from ...validation import check_encoder_attention
from ._attend import attend_to_keys, store_rows


def encoder_attention(
    query: Query,
    key: RaggedKey,
    value: RaggedValue,
    query_start_loc: StartLoc,
    key_start_loc: StartLoc,
    max_query_len: int,
    max_key_len: int,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return attention of each request's queries over its keys, which lie one after another.

    Args:
        query: [tokens, query_heads, head_size], request after request, any strides.
        key: [key_tokens, kv_heads, head_size], the same requests in the same order, any strides
            (a slice of a fused projection is fine).
        value: [key_tokens, kv_heads, value_head_size], any strides.
        query_start_loc: [reqs + 1] where each request's queries start.
        key_start_loc: [reqs + 1] where each request's keys start.
        max_query_len: at least the queries of every request.
        max_key_len: at least the keys of every request.
        scale, out, lse, compute_dtype: as in `paged_attention`.
        sliding_window, attention_chunk_size, query_ranges: as there; a window has as many keys
            on the right as on the left unless the request is causal.
        logits_soft_cap, alibi_slopes, sinks, position_bias, out_scale, batch_invariant: as there.
        causal: whether a query sees no further than itself; [reqs] bool: for each request. The
            queries of a causal request stand at the end of its keys.

    Returns:
        `out`; 0, with log-sum-exp -inf, where a query sees nothing.

    Raises:
        ValueError: shapes that do not fit, heads that do not divide, starts that fall, options
            out of range or without meaning beside each other.
        TypeError: dtypes that do not fit.

    Source:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017.

    Example:
        Two requests of one and two tokens, keys all alike: the first sees its own value, the
        others the mean of both of theirs.

        >>> encoder_attention(
        ...     query=torch.ones(3, 1, 1),
        ...     key=torch.ones(3, 1, 1),
        ...     value=torch.tensor([7.0, 2.0, 4.0]).view(3, 1, 1),
        ...     query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        ...     key_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        ...     max_query_len=2,
        ...     max_key_len=2,
        ... ).flatten()
        tensor([7., 3., 3.])
    """
    options = options.with_causal(False)
    check_encoder_attention(
        query,
        key,
        value,
        query_start_loc,
        key_start_loc,
        max_query_len,
        max_key_len,
        out,
        lse,
        options,
        contents=True,
    )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if out is None:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    starts, key_starts = query_start_loc.tolist(), key_start_loc.tolist()
    for req in range(len(starts) - 1):
        rows = slice(starts[req], starts[req + 1])
        # step: gather the sequence's keys and values
        keys = slice(key_starts[req], key_starts[req + 1])
        result, row_lse = attend_to_keys(
            query[rows],
            key[keys],
            value[keys],
            req,
            rows,
            scale,
            options,
            compute_dtype,
        )
        store_rows(result, out[rows], options)
        if lse is not None:
            lse[:, rows] = row_lse.to(lse.dtype)
    return out
