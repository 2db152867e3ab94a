"""What does each new token see of its sequence?

Every new token asks a question (its query) of all tokens up to itself. Their keys and values lie in
the cache, scattered over blocks, the new token's own among them: it was written just before. So
attention gathers the sequence through its row of the block table and then does what attention
always does: compare the query with every key, turn the scores into weights, and average the values
by them. Prefills, decodes and everything between differ only in how many queries there are.
"""

import torch

from ..shared.refusals import check_paged_attention
from ..shared.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    PerHead,
    Query,
    StartLoc,
    TokenCounts,
    ValueCache,
)
from .cache_ops import gather_cache


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
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: PerHead | None = None,
    sinks: PerHead | None = None,
) -> Output:
    """Return causal attention of each new token over its sequence in the paged cache.

    The new tokens are the last ones of their sequence, so query j of q sees the first
    seq_len - q + j + 1 keys.

    Args:
        query: [tokens, query_heads, head_size], request after request. `query_heads` is a
            multiple of `kv_heads`; query head h reads kv head h * kv_heads // query_heads.
        key_cache: [num_blocks, block_size, kv_heads, head_size], the new tokens' keys included.
        value_cache: the same shape.
        block_table: [reqs, max_blocks]; entries past a sequence's end are never read.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence, the new ones included; 0 where there is none.
        max_query_len: at least the queries of every request.
        max_seq_len: at least every entry of `seq_lens`.
        scale: what scores are multiplied with; None: 1 / sqrt(head_size).
        out: [tokens, query_heads, head_size], changed; None: a new tensor.
        lse: [query_heads, tokens] float32 or float64, changed: the natural log-sum-exp of each
            query's scaled scores, which joins partial results; None: not wanted.
        compute_dtype: the dtype of all arithmetic.
        sliding_window: keys that a query sees, its own token included; None: all up to it.
        logits_soft_cap: cap c turns a scaled score s into c * tanh(s / c); None: no cap.
        alibi_slopes: [query_heads] float32; a score gets slope * (key position - query position)
            added, after the cap.
        sinks: [query_heads] float32; a score beside those of the keys that takes weight and
            has no value.

    Returns:
        `out`. Rows past the last request are 0, their log-sum-exp -inf.

    Raises:
        IndexError: a length or a block id outside the table or the cache.
        ValueError: shapes that do not fit, heads that do not divide, more queries than keys.
        TypeError: dtypes that do not fit.

    Source:
        Kwon et al., "Efficient Memory Management for Large Language Model Serving with
        PagedAttention", SOSP 2023. Sliding window: Beltagy et al., "Longformer", 2020. Soft cap:
        Gemma 2, 2024. ALiBi: Press et al., "Train Short, Test Long", ICLR 2022. Sinks: Xiao et
        al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024.

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
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        contents=True,
    )
    if scale is None:
        scale = query.shape[-1] ** -0.5
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    group_size = query.shape[1] // key_cache.shape[2]
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[req], starts[req + 1])
        query_len = starts[req + 1] - starts[req]
        if query_len == 0:
            continue
        # step: gather the sequence's keys and values
        key, value = gather_cache(
            key_cache,
            value_cache,
            block_table[req : req + 1],
            torch.tensor([0, seq_len], dtype=torch.int32, device=query.device),
            seq_len,
        )
        # keys before the first query's window are seen by nobody and may hold anything
        first = 0
        if sliding_window is not None:
            first = max(0, seq_len - query_len + 1 - sliding_window)
        # every query head gets a copy of the kv head it reads: [keys, query_heads, head_size]
        key = key[first:].repeat_interleave(group_size, dim=1).to(compute_dtype)
        value = value[first:].repeat_interleave(group_size, dim=1).to(compute_dtype)
        # step: compare each query with every key
        question = query[rows].to(compute_dtype)
        scores = torch.einsum("qhd,khd->hqk", question, key) * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        query_position = torch.arange(seq_len - query_len, seq_len, device=query.device)
        key_position = torch.arange(first, seq_len, device=query.device)
        distance = key_position[None, :] - query_position[:, None]  # 0: the own token
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None, None].to(compute_dtype) * distance
        # step: hide the keys that a query does not see
        hidden = distance > 0
        if sliding_window is not None:
            hidden |= distance <= -sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        # step: turn scores into weights
        score_lse = scores.logsumexp(dim=2)  # [query_heads, query_len]
        if sinks is not None:
            score_lse = torch.logaddexp(score_lse, sinks[:, None].to(compute_dtype))
        weights = torch.exp(scores - score_lse[:, :, None])
        # step: average the values by them
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
        if lse is not None:
            lse[:, rows] = score_lse.to(lse.dtype)
    return out
