"""Encoder attention: tokens attend to each other without a cache.

An encoder reads its whole input at once: every token attends to every other one, in both
directions, and nothing is kept for later. So keys and values are stored request after request
(ragged), without a block table. Queries and keys have starts of their own and may differ in
number: the tokens of a decoder may attend to those of an encoder.
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
from ...validation import check_encoder_attention, validated
from .heads import repeat_heads
from .masks import visible_keys, zero_masked
from .output import start_output, write_output
from .requests.split_requests import split_requests
from .scores import modify_scores
from .softmax import softmax


@validated(check_encoder_attention)
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
        max_query_len: At least the number of queries of every request. A captured graph keeps
            this number and the next one, so they must hold for every replay.
        max_key_len: At least the number of keys of every request.
        scale, out, lse, compute_dtype: As in `paged_attention`.
        options: Masks, score functions and the FP8 scale of `out`. Not causal unless they say
            so; the queries of a causal request are at the end of its keys. A window has as many
            keys after a query as before it.

    Returns:
        `out`. A query without a visible key gets 0 and the log-sum-exp -inf.

    Raises:
        NotImplementedError: An option that needs a cache is given: a tree, or a scale of keys or
            values.
        ValueError: Shapes do not match, heads do not divide, starts decrease, or options are out
            of range or meaningless together.
        TypeError: A dtype is not the expected one.

    Source:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017.

    Example:
        Two requests of one and two tokens, all keys equal. The first token gets its own value,
        the others the mean of theirs.

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
    query_heads, head_size = query.shape[1:]
    scale = head_size**-0.5 if scale is None else scale
    out = start_output(query, value.shape[2], out, lse)
    for request in split_requests(query_start_loc, key_start_loc.diff(), options):
        # step: gather the sequence's keys and values
        rows = key_start_loc[request.index] + request.keys
        k = repeat_heads(key[rows].to(compute_dtype), query_heads)
        v = repeat_heads(value[rows].to(compute_dtype), query_heads)
        # step: compute the scaled dot products of queries and keys
        q = query[request.rows].to(compute_dtype)  # [queries, query_heads, head_size]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = modify_scores(scores, request, options)
        # step: mask the keys outside the visible range
        visible = visible_keys(request, options)  # [queries, keys]
        scores = scores.masked_fill(~visible, -torch.inf)
        v = zero_masked(v, visible)
        # step: turn scores into weights (softmax)
        weights, row_lse = softmax(scores, options.sinks)
        # step: average the values by the weights
        result = torch.einsum("hqk,khd->qhd", weights, v)
        write_output(result, row_lse, out, lse, request, options)
    return out
