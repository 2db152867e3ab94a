"""Multi-head latent attention: the cache holds one latent vector per token.

Multi-head latent attention compresses each token to a latent, from which every head's key and value
can be computed again, plus one key part that carries the position (rope) and that all heads share.
The cache keeps just these two, so its width does not grow with the number of heads.

There are two ways to the same result. A prompt has many queries on few keys: its latents are
expanded to keys and values of all heads, which then attend as always. A decode has few queries on
many keys, and to expand them all would cost more than to attend. But a head's score is
query * (w_uk * latent), which is (query * w_uk) * latent: so the query is carried into the space of
the latents instead, once, and all heads read the cache as it is, as one head that they share. The
mean of the latents is expanded at the end, once a query.
"""

import torch

from ...bookkeeping.attention.latent import get_mla_dims as get_mla_dims
from ...contract.attention_options import AttentionOptions
from ...contract.latent_classes import MLADims as MLADims
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
    Scale,
    SlotMapping,
    StartLoc,
    TokenCounts,
    ValueUpProjection,
)
from ...validation.latent import (
    check_concat_and_cache_mla,
    check_latent_decode_attention,
    check_latent_prefill_attention,
)
from ..cache._fp8 import quantise
from ._latent import expand_latents, gather_latents
from .encoder import encoder_attention
from .merge_states import merge_attn_states


def concat_and_cache_mla(
    kv_c: Latent,
    k_pe: RopeKey,
    kv_cache: LatentCache,
    slot_mapping: SlotMapping,
    scale: Scale | float | None = None,
) -> None:
    """Write each new token's latent and rope key, one behind the other, to its slot.

    Args:
        kv_c: [tokens, kv_lora_rank], any strides (a slice of a fused projection is fine).
        k_pe: [tokens, qk_rope_head_dim], any strides; the rotation is already done.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], changed; of the same
            dtype, or FP8.
        slot_mapping: [slots] slot of the first `slots` tokens; a negative one is not stored.
            Tokens past its end are padding and are not stored either.
        scale: what the numbers of an FP8 cache will be multiplied with; None: the cache is not
            quantised.

    Raises:
        IndexError: a slot lies outside the cache.
        ValueError: shapes or devices that do not fit, two tokens for one slot, an FP8 cache
            without a scale, or a scale without one.
        TypeError: dtypes that do not fit.

    Source:
        vLLM's function of that name.

    Example:
        Blocks of 2 slots, a latent of 2 elements and a rope key of 1: slot 3 is offset 1 of
        block 1.

        >>> kv_cache = torch.zeros(2, 2, 3)
        >>> concat_and_cache_mla(
        ...     kv_c=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        ...     k_pe=torch.tensor([[5.0], [6.0]]),
        ...     kv_cache=kv_cache,
        ...     slot_mapping=torch.tensor([3, -1]),
        ... )
        >>> kv_cache.flatten()
        tensor([0., 0., 0., 0., 0., 0., 0., 0., 0., 1., 2., 5.])
    """
    check_concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, scale, contents=True)
    block_size = kv_cache.shape[1]
    latents = torch.cat([kv_c, k_pe], dim=1)
    if scale is not None:
        latents = quantise(latents, scale, kv_cache.dtype)
    for token, slot in enumerate(slot_mapping.tolist()):
        # step: skip tokens without a slot
        if slot < 0:
            continue
        # step: find block and offset
        block_id, offset = divmod(slot, block_size)
        # step: store the latent and the rope key
        kv_cache[block_id, offset] = latents[token]


def latent_decode_attention(
    q_nope: NopeQuery,
    q_pe: RopeQuery,
    kv_cache: LatentCache,
    w_uk: KeyUpProjection,
    w_uv: ValueUpProjection,
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
    k_scale: Scale | float | None = None,
) -> Output:
    """Return causal attention of each new token over its latents in the paged cache.

    The way for few queries on many keys: decodes, and the several drafted tokens of a speculative
    one. It takes any number of queries a request.

    Args:
        q_nope: [tokens, query_heads, qk_nope_head_dim], request after request: the part of the
            query without position.
        q_pe: [tokens, query_heads, qk_rope_head_dim]: the part with position, rotated.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], the new tokens'
            latents included.
        w_uk: [query_heads, qk_nope_head_dim, kv_lora_rank]: times a latent it is a head's key,
            up to the rope key.
        w_uv: [query_heads, kv_lora_rank, v_head_dim]: a latent times it is a head's value.
        block_table, query_start_loc, seq_lens, max_query_len, max_seq_len: as in
            `paged_attention`.
        scale: what scores are multiplied with; None: 1 / sqrt(qk_nope_head_dim +
            qk_rope_head_dim), the width of a head's key and not of what is cached.
        out: [tokens, query_heads, v_head_dim], changed; None: a new tensor.
        lse, compute_dtype, sliding_window: as in `paged_attention`.
        k_scale: what the numbers of an FP8 cache are multiplied with, one for all; None: the
            cache is not quantised.

    Returns:
        `out`. Rows past the last request get 0 and the log-sum-exp -inf.

    Raises:
        IndexError: a length or a block id outside the table or the cache.
        ValueError: widths, heads or batches that do not fit, more queries than keys, an FP8
            cache without a scale, or a scale without one.
        TypeError: dtypes that do not fit.

    Source:
        DeepSeek-V2, 2024, section 2.1; vLLM's `MLACommonImpl`, "data-movement friendly" way.

    Example:
        One sequence of two tokens, the second is new. Its query looks for the second element of
        the latents, of which there is 0 and 1: weights e^0 and e^1.0986, 1 to 3. The value is the
        first element, 8 and 4: a quarter of 8 and three quarters of 4.

        >>> latent_decode_attention(
        ...     q_nope=torch.tensor([[[3.0]]]).log(),
        ...     q_pe=torch.zeros(1, 1, 1),
        ...     kv_cache=torch.tensor([[[8.0, 0.0, 9.0], [4.0, 1.0, 9.0]]]),
        ...     w_uk=torch.tensor([[[0.0, 1.0]]]),
        ...     w_uv=torch.tensor([[[1.0], [0.0]]]),
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([2], dtype=torch.int32),
        ...     max_query_len=1,
        ...     max_seq_len=2,
        ...     scale=1.0,
        ... ).flatten()
        tensor([5.])
    """
    check_latent_decode_attention(
        q_nope,
        q_pe,
        kv_cache,
        w_uk,
        w_uv,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        out,
        lse,
        sliding_window,
        k_scale,
        contents=True,
    )
    if scale is None:
        scale = (q_nope.shape[2] + q_pe.shape[2]) ** -0.5
    if out is None:
        out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[2])
    q_nope, q_pe, w_uk, w_uv = (x.to(compute_dtype) for x in (q_nope, q_pe, w_uk, w_uv))
    # step: carry the queries into the space of the latents
    query = torch.cat([torch.einsum("thn,hnl->thl", q_nope, w_uk), q_pe], dim=2)
    # step: attend to them as to the keys and values of one head
    start_loc = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int()
    latents = gather_latents(kv_cache, block_table, start_loc, k_scale, compute_dtype)
    key = latents[:, None]
    mean = encoder_attention(
        query,
        key,
        key[..., : w_uk.shape[2]],
        query_start_loc,
        start_loc,
        max_query_len,
        max_seq_len,
        scale=scale,
        lse=lse,
        compute_dtype=compute_dtype,
        options=AttentionOptions(causal=True, sliding_window=sliding_window),
    )
    # step: expand each head's mean latent to its value
    return out.copy_(torch.einsum("thl,hlv->thv", mean, w_uv))


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
    k_scale: Scale | float | None = None,
) -> Output:
    """Return causal attention of each new token over its sequence, expanded from its latents.

    The way for many queries: new tokens are expanded from what the layer has just computed, and
    only what came before them, their context, is read from the cache, a chunk at a time. Without
    a sliding window: a layer with one takes `latent_decode_attention`.

    Args:
        q_nope, q_pe: as in `latent_decode_attention`.
        kv_c: [tokens, kv_lora_rank] latents of the new tokens, any strides; as they are here,
            not as an FP8 cache rounds them.
        k_pe: [tokens, qk_rope_head_dim] their rope keys, rotated, any strides.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]; the new tokens'
            slots are not read.
        w_uk, w_uv: as in `latent_decode_attention`.
        block_table, query_start_loc, seq_lens, max_query_len, max_seq_len: as in
            `paged_attention`; `seq_lens` counts the new tokens too.
        num_context_tokens: at least the context of all requests together; 0: nothing is cached.
        max_context_chunk: how many tokens of the context, of all requests together, are expanded
            at once; None: all.
        scale, out, lse, compute_dtype, k_scale: as in `latent_decode_attention`.

    Returns:
        `out`. Rows past the last request get 0 and the log-sum-exp -inf.

    Raises:
        IndexError: a length or a block id outside the table or the cache.
        ValueError: widths, heads or batches that do not fit, more queries than keys, an FP8
            cache without a scale, or a scale without one.
        TypeError: dtypes that do not fit.

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
    check_latent_prefill_attention(
        q_nope,
        q_pe,
        kv_c,
        k_pe,
        kv_cache,
        w_uk,
        w_uv,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        num_context_tokens,
        max_context_chunk,
        out,
        lse,
        k_scale,
        contents=True,
    )
    if out is None:
        out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[2])
    rank = kv_c.shape[1]
    query, kv_c, k_pe, w_uk, w_uv = (
        x.to(compute_dtype)
        for x in (torch.cat([q_nope, q_pe], dim=2), kv_c, k_pe, w_uk, w_uv)
    )
    context_lens = seq_lens - query_start_loc.diff()
    context_start_loc = torch.nn.functional.pad(context_lens.cumsum(0), (1, 0)).int()
    # step: expand the new tokens' latents to keys and values
    key, value = expand_latents(kv_c, k_pe, w_uk, w_uv)
    # step: attend to the new tokens, each up to itself
    total_lse = query.new_empty(
        query.shape[1],
        query.shape[0],
        dtype=torch.promote_types(compute_dtype, torch.float32),
    )
    total = encoder_attention(
        query,
        key,
        value,
        query_start_loc,
        query_start_loc,
        max_query_len,
        max_query_len,
        scale=scale,
        lse=total_lse,
        compute_dtype=compute_dtype,
        options=AttentionOptions(causal=True),
    )
    chunk = num_context_tokens if max_context_chunk is None else max_context_chunk
    for begin in range(0, num_context_tokens, max(chunk, 1)):
        # step: gather the next chunk of the context
        latents = gather_latents(
            kv_cache,
            block_table,
            context_start_loc,
            k_scale,
            compute_dtype,
            begin,
            begin + chunk,
        )
        starts = (context_start_loc - begin).clamp(0, len(latents))
        # step: expand its latents to keys and values
        key, value = expand_latents(latents[:, :rank], latents[:, rank:], w_uk, w_uv)
        # step: attend to all of it
        part_lse = torch.empty_like(total_lse)
        part = encoder_attention(
            query,
            key,
            value,
            query_start_loc,
            starts,
            max_query_len,
            min(chunk, max_seq_len),
            scale=scale,
            lse=part_lse,
            compute_dtype=compute_dtype,
        )
        # step: join it with what is there
        merge_attn_states(
            part, part_lse, total, total_lse, output=total, output_lse=total_lse
        )
    out.copy_(total)
    if lse is not None:
        lse.copy_(total_lse)
    return out
