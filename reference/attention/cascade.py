"""Cascade attention: a prefix that all requests share is read once.

Requests that begin alike (the same system prompt, the same document) have the same first blocks in
their rows. Attention request by request reads those keys again for each. But every new token stands
behind the whole prefix, so none of its keys is hidden from any: to the prefix, all queries of the
batch are one request that sees everything. Its result and that over the rest of each row are two
states over different keys, and join by their log-sum-exp.
"""

from dataclasses import replace

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
from ...validation.cascade import check_cascade
from .merge_states import merge_attn_states
from .paged import paged_attention


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

    The same as `paged_attention`, whose arguments these are.

    Args:
        query: [tokens, query_heads, head_size].
        key_cache: [num_blocks, block_size, kv_heads, head_size].
        value_cache: [num_blocks, block_size, kv_heads, value_head_size].
        block_table: [reqs, max_blocks]; the prefix is read through row 0. The other rows begin
            with the same ids, which are not read.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence, prefix and new ones included.
        max_query_len: at least the queries of every request.
        max_seq_len: at least every entry of `seq_lens`.
        common_prefix_len: keys that all sequences begin with, whole blocks of them; every new
            token lies behind them. Requests without new tokens need not share them. 0: none.
        scale: what scores are multiplied with; None: 1 / sqrt(head_size).
        out: [tokens, query_heads, value_head_size], changed; None: a new tensor.
        lse: [query_heads, tokens] float32 or float64, changed: the natural log-sum-exp of each
            query's scaled scores over all its keys; None: not wanted.
        compute_dtype: the dtype of all arithmetic, and of what both parts leave.
        logits_soft_cap: cap c turns a scaled score s into c * tanh(s / c); None: no cap.
        sinks: [query_heads] float32; they take weight once, beside the rest.
        k_scale, v_scale: what the numbers of an FP8 cache are multiplied with.
        causal: whether a query sees no further than itself; [reqs] bool: for each request.
        tree_mask: [reqs, tree, tree] bool: which new token of a request sees which.
        sliding_window, attention_chunk_size, alibi_slopes, position_bias, query_ranges: refused.

    Returns:
        `out`.

    Raises:
        NotImplementedError: an option that counts positions: the queries of different requests
            stand at different ones, and to the prefix they are one request.
        ValueError: a prefix that is not whole blocks, that the rows do not share, or that reaches
            into the new tokens; besides, as IndexError and TypeError: what `paged_attention`
            refuses.

    Source:
        Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade Inference", FlashInfer, 2024;
        vLLM's function of that name.

    Example:
        Two sequences of three tokens share block 2; their last tokens lie in blocks 0 and 1.

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
    options = options.with_causal(True)
    check_cascade(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        common_prefix_len,
        out,
        lse,
        options,
        contents=True,
    )
    if not common_prefix_len or not len(block_table):
        return paged_attention(
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            max_query_len,
            max_seq_len,
            scale=scale,
            out=out,
            lse=lse,
            compute_dtype=compute_dtype,
            options=options,
        )
    tokens, query_heads, _ = query.shape
    if out is None:
        out = query.new_empty(tokens, query_heads, value_cache.shape[-1])
    # the parts keep the dtype of the arithmetic, so that the result is rounded once
    parts = out.new_empty(2, *out.shape, dtype=compute_dtype)
    lse_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    lses = out.new_empty(2, query_heads, tokens, dtype=lse_dtype)
    prefix_blocks = common_prefix_len // key_cache.shape[1]
    # step: attend to the shared prefix, all queries as one request
    paged_attention(
        query,
        key_cache,
        value_cache,
        block_table[:1, :prefix_blocks],
        # rows behind the last request stay nobody's
        torch.cat([query_start_loc[:1], query_start_loc[-1:]]),
        seq_lens.new_full((1,), common_prefix_len),
        max_query_len=tokens,
        max_seq_len=common_prefix_len,
        scale=scale,
        out=parts[0],
        lse=lses[0],
        compute_dtype=compute_dtype,
        options=replace(options, causal=False, tree_mask=None, sinks=None),
    )
    # step: attend to the rest of each sequence
    paged_attention(
        query,
        key_cache,
        value_cache,
        block_table[:, prefix_blocks:],
        query_start_loc,
        # a request without new tokens may be shorter than the prefix
        (seq_lens - common_prefix_len).clamp(min=0),
        max_query_len,
        max_seq_len=max(max_seq_len - common_prefix_len, 0),
        scale=scale,
        out=parts[1],
        lse=lses[1],
        compute_dtype=compute_dtype,
        options=options,
    )
    # step: join both by their log-sum-exp
    return merge_attn_states(
        parts[0], lses[0], parts[1], lses[1], output=out, output_lse=lse
    )
