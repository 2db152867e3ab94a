"""Paged attention: new tokens attend to keys and values in cache blocks.

Attention of one query is an average of values: each key's weight is the softmax of its scaled dot
product with the query. Here the queries are the new tokens of a step, and the keys and values are
in the cache, in the blocks that the sequence's row of the block table names. The new tokens' own
keys are there too, as they were written just before. So attention gathers each sequence through
its row, and then does what attention always does. A decode has one query per request, a prefill
has many; nothing else differs between them.

Masks (`masks/`) choose the keys that a query attends to. Score functions (`scores/`) modify the
dot products. `softmax.py` turns scores into weights.
"""

import torch

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
from ...validation import check_paged_attention, validated
from ..cache.formats import load_slots
from .heads import repeat_heads
from .masks import visible_keys, zero_masked
from .output import start_output, write_output
from .requests.split_requests import split_requests
from .scores import modify_scores
from .softmax import softmax


@validated(check_paged_attention)
def paged_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return attention of each new token over its sequence in the paged cache.

    The new tokens are the last ones of their sequence: new token j of q has position
    seq_len - q + j.

    Args:
        query: [tokens, query_heads, head_size], request after request. `query_heads` is a
            multiple of `kv_heads`; query head h reads kv head h * kv_heads // query_heads.
        key_cache: [num_blocks, block_size, kv_heads, head_size], the new tokens' keys included.
        value_cache: [num_blocks, block_size, kv_heads, value_head_size]. In a packed format, with
            two codes per byte, both caches have half as many elements.
        block_table: [reqs, max_blocks]. Entries past the end of a sequence are never read.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence, the new ones included.
        max_query_len: At least the number of queries of every request. A captured graph keeps
            this number and the next one, so they must hold for every replay.
        max_seq_len: At least every entry of `seq_lens`.
        scale: Factor of the dot products. If None, 1 / sqrt(head_size).
        out: Optional. [tokens, query_heads, value_head_size], modified in place. If None, a new
            tensor in the dtype of `query` is returned.
        lse: Optional. [query_heads, tokens] float32 or float64, modified in place: the natural
            log-sum-exp of each query's scores, which combines partial results.
        compute_dtype: The dtype of all arithmetic.
        options: Masks, score functions and the cache's scales. Causal unless they say otherwise. A
            request that is not causal may have more queries than keys (cross-attention).

    Returns:
        `out`. A query without a visible key gets 0 and the log-sum-exp -inf, or that of its sink.
        Rows past the last request get 0 and -inf.

    Raises:
        IndexError: A length or a block id is outside the table or the cache.
        ValueError: Shapes do not match, heads do not divide, a request has more queries than
            keys, options are out of range or meaningless together, or `out` or `lse` shares memory
            with the other one, with itself (an expanded tensor), or with the queries or caches.
        TypeError: A dtype is not the expected one.

    Source:
        Kwon et al., "Efficient Memory Management for Large Language Model Serving with
        PagedAttention", SOSP 2023.

    Example:
        One sequence of two tokens, both new, all keys equal. Token 0 gets its own value, token 1
        the mean of both.

        >>> paged_attention(
        ...     query=torch.ones(2, 1, 1),
        ...     key_cache=torch.ones(3, 2, 1, 1),
        ...     value_cache=torch.arange(6.0).view(3, 2, 1, 1),
        ...     block_table=torch.tensor([[2]], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        ...     seq_lens=torch.tensor([2], dtype=torch.int32),
        ...     max_query_len=2,
        ...     max_seq_len=2,
        ... ).flatten()
        tensor([4.0000, 4.5000])
    """
    options = options.with_causal(True)
    query_heads, head_size = query.shape[1:]
    scale = head_size**-0.5 if scale is None else scale
    out = start_output(query, head_size_of(value_cache), out, lse)
    for request in split_requests(query_start_loc, seq_lens, options):
        # step: gather the sequence's keys and values
        block = block_table[request.index, request.keys // key_cache.shape[1]].long()
        offset = request.keys % key_cache.shape[1]
        k = load_slots(key_cache, block, offset, compute_dtype, *options.k_scales)
        v = load_slots(value_cache, block, offset, compute_dtype, *options.v_scales)
        k, v = repeat_heads(k, query_heads), repeat_heads(v, query_heads)
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
