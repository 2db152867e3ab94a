"""Latent attention for prefills: latents are expanded to keys and values of every head."""

from functools import partial

import torch

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.shapes import (
    BlockTable,
    KeyUpProjection,
    Latent,
    LatentCache,
    LogSumExp,
    NopeQuery,
    Output,
    RopeKey,
    RopeQuery,
    StartLoc,
    TokenCounts,
    ValueUpProjection,
)
from ...validation import validated
from ...validation.latent import check_latent_prefill_attention
from .encoder import encoder_attention
from .latent_vectors import context_chunks, expand_latents
from .merge_states import merge_attn_states


@validated(check_latent_prefill_attention)
def latent_prefill_attention(
    q_nope: NopeQuery,
    q_pe: RopeQuery,
    kv_c: Latent,
    k_pe: RopeKey,
    kv_cache: LatentCache,
    w_uk: KeyUpProjection,
    w_uv: ValueUpProjection,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    num_context_tokens: int,
    max_context_chunk: int | None = None,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return causal attention of each new token over its sequence, expanded from its latents.

    For many queries: the latents of new tokens are expanded from what the layer has just computed.
    Only their context, the tokens before them, is read from the cache, in chunks. A layer with a
    sliding window uses `latent_decode_attention`.

    Args:
        q_nope, q_pe: As in `latent_decode_attention`.
        kv_c: [tokens, kv_lora_rank] latents of the new tokens, any strides. They are used as they
            are here, not as an FP8 cache or a record rounds them.
        k_pe: [tokens, qk_rope_head_dim] their rope keys, already rotated, any strides.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], or records in uint8,
            as in `concat_and_cache_mla`. The new tokens' slots are not read.
        w_uk, w_uv: As in `latent_decode_attention`.
        block_table, query_start_loc, seq_lens, max_query_len, max_seq_len: As in
            `paged_attention`; `seq_lens` counts the new tokens too.
        num_context_tokens: At least the number of context tokens of all requests together. 0
            means that nothing is cached.
        max_context_chunk: Context tokens, of all requests together, that are expanded at once. If
            None, all are.
        scale, out, lse, compute_dtype: As in `latent_decode_attention`.
        options: `k_scale`, as in `latent_decode_attention`.

    Returns:
        `out`. Rows past the last request get 0 and the log-sum-exp -inf.

    Raises:
        NotImplementedError: Another option is given.
        IndexError: A length or a block id is outside the table or the cache.
        ValueError: Widths, heads or lengths do not match, a request has more queries than keys,
            or only one of an FP8 cache and its scale is given.
        TypeError: A dtype is not the expected one.

    Source:
        DeepSeek-V2, 2024, section 2.1; vLLM's `MLACommonImpl`, "compute friendly" way with chunked
        context.

    Example:
        The sequence of `latent_decode_attention`: the first token is cached, the second is new.

        >>> latent_prefill_attention(
        ...     q_nope=torch.tensor([[[3.0]]]).log(),
        ...     q_pe=torch.zeros(1, 1, 1),
        ...     kv_c=torch.tensor([[4.0, 1.0]]),
        ...     k_pe=torch.tensor([[9.0]]),
        ...     kv_cache=torch.tensor([[[8.0, 0.0, 9.0], [0.0, 0.0, 0.0]]]),
        ...     w_uk=torch.tensor([[[0.0, 1.0]]]),
        ...     w_uv=torch.tensor([[[1.0], [0.0]]]),
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([2], dtype=torch.int32),
        ...     max_query_len=1,
        ...     max_seq_len=2,
        ...     num_context_tokens=1,
        ...     scale=1.0,
        ... ).flatten()
        tensor([5.])
    """
    dtype, rank = q_nope.dtype, kv_c.shape[1]
    query = torch.cat([q_nope, q_pe], dim=2)
    query, kv_c, k_pe, w_uk, w_uv = (
        x.to(compute_dtype) for x in (query, kv_c, k_pe, w_uk, w_uv)
    )
    attend = partial(
        encoder_attention,
        query,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        compute_dtype=compute_dtype,
    )
    lse_shape = (2, query.shape[1], query.shape[0])
    lse_dtype = torch.promote_types(compute_dtype, torch.float32)
    total_lse, chunk_lse = query.new_empty(lse_shape, dtype=lse_dtype)
    # step: expand the new tokens' latents to keys and values
    key, value = expand_latents(kv_c, k_pe, w_uk, w_uv)
    # step: attend to the new tokens with a causal mask
    total = attend(
        key,
        value,
        key_start_loc=query_start_loc,
        max_key_len=max_query_len,
        lse=total_lse,
        options=AttentionOptions(causal=True),
    )
    for latents, starts in context_chunks(
        kv_cache,
        block_table,
        seq_lens - query_start_loc.diff(),
        num_context_tokens,
        max_context_chunk,
        options.k_scale,
        compute_dtype,
    ):
        # step: expand the chunk's latents to keys and values
        key, value = expand_latents(latents[:, :rank], latents[:, rank:], w_uk, w_uv)
        # step: attend to the whole chunk
        own = attend(
            key, value, key_start_loc=starts, max_key_len=len(latents), lse=chunk_lse
        )
        # step: merge its result with the results so far
        merge_attn_states(
            own, chunk_lse, total, total_lse, output=total, output_lse=total_lse
        )
    if lse is not None:
        lse.copy_(total_lse)
    return total.to(dtype) if out is None else out.copy_(total)
