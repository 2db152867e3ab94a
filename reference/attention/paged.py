"""Paged attention: new tokens attend to keys and values in cache blocks.

Every new token asks a question (its query) of all tokens up to itself. Their keys and values lie in
the cache, scattered over blocks, the new token's own among them: it was written just before. So
attention gathers the sequence through its row of the block table and then does what attention
always does: compare the query with every key, turn the scores into weights, and average the values
by them. Prefills, decodes and everything between differ only in how many queries there are; options
change which keys a query sees, or what a score is, and mean the same in all of them.
"""

import torch

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
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
from ...validation import check_paged_attention
from ..cache.cache_ops import gather_cache
from ._attend import attend_to_keys, store_rows


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

    The new tokens are the last ones of their sequence: query j of q stands at position
    seq_len - q + j, and sees the keys up to there.

    Args:
        query: [tokens, query_heads, head_size], request after request. `query_heads` is a
            multiple of `kv_heads`; query head h reads kv head h * kv_heads // query_heads.
        key_cache: [num_blocks, block_size, kv_heads, head_size], the new tokens' keys included.
        value_cache: [num_blocks, block_size, kv_heads, value_head_size].
        block_table: [reqs, max_blocks]; entries past a sequence's end are never read.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence, the new ones included; 0 where there is none.
        max_query_len: at least the queries of every request.
        max_seq_len: at least every entry of `seq_lens`.
        scale: what scores are multiplied with; None: 1 / sqrt(head_size).
        out: [tokens, query_heads, value_head_size], changed; None: a new tensor.
        lse: [query_heads, tokens] float32 or float64, changed: the natural log-sum-exp of each
            query's scaled scores, which joins partial results; None: not wanted.
        compute_dtype: the dtype of all arithmetic.
        sliding_window: keys that a query sees to each side, its own token included; None: all.
        logits_soft_cap: cap c turns a scaled score s into c * tanh(s / c); None: no cap.
        alibi_slopes: [query_heads] float32; a score gets slope * (key position - query position)
            added, after the cap.
        sinks: [query_heads] float32; a score beside those of the keys that takes weight and
            has no value.
        causal: whether a query sees no further than itself; [reqs] bool: for each request. One
            that is not causal may have more queries than keys: cross-attention to an encoder.
        attention_chunk_size: positions in a chunk; a query sees its own chunk only.
        tree_mask: [reqs, tree, tree] bool: new token i of a request sees new token j, beside all
            that came before the new ones. A token stands one behind those it sees. Requests with
            more new tokens than `tree` are causal.
        query_ranges: [tokens, 2] int32 first and last position of a range that the query sees
            whatever else hides it, such as the image it belongs to; (-1, -1), or a first behind
            the last: none.
        position_bias: [query_heads, 2 * reach + 1] float32, added to the score: entry reach + d
            for a key d positions behind the query (before it: d < 0), -reach or reach for
            those further away.
        k_scale, v_scale: what the numbers of an FP8 cache are multiplied with, one for all or
            [kv_heads] float32; None: the cache is not quantised.
        out_scale: what the numbers of an FP8 `out` will be multiplied with; None: `out` is not
            quantised.
        batch_invariant: whether a row's result has the same bits whatever else is in the batch, in
            whatever pieces its sequence is computed, and in whatever blocks it lies. It costs time.

    Returns:
        `out`. Queries that see nothing get 0 and the log-sum-exp -inf (that of their sink, if
        there is one); so do rows past the last request, without a sink.

    Raises:
        IndexError: a length or a block id outside the table or the cache.
        ValueError: shapes that do not fit, heads that do not divide, more queries than keys,
            options out of range or without meaning beside each other.
        TypeError: dtypes that do not fit.

    Source:
        Kwon et al., "Efficient Memory Management for Large Language Model Serving with
        PagedAttention", SOSP 2023. Sliding window: Beltagy et al., "Longformer", 2020. Soft cap:
        Gemma 2, 2024. ALiBi: Press et al., "Train Short, Test Long", ICLR 2022. Sinks: Xiao et
        al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024. Trees: Miao et
        al., "SpecInfer", ASPLOS 2024. Bias: Raffel et al., "T5", JMLR 2020.

    Example:
        One sequence of two tokens, both new, keys all alike: token 0 sees only its own value,
        token 1 the mean of both.

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
    check_paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        out,
        lse,
        options,
        contents=True,
    )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if out is None:
        out = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[req], starts[req + 1])
        # step: gather the sequence's keys and values
        key, value = gather_cache(
            key_cache,
            value_cache,
            block_table[req : req + 1],
            torch.tensor([0, seq_len], dtype=torch.int32, device=query.device),
            seq_len,
        )
        result, row_lse = attend_to_keys(
            query[rows], key, value, req, rows, scale, options, compute_dtype
        )
        store_rows(result, out[rows], options)
        if lse is not None:
            lse[:, rows] = row_lse.to(lse.dtype)
    return out
