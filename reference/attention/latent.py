"""Multi-head latent attention: the cache holds one latent vector per token.

Multi-head latent attention compresses each token to a latent vector, from which every head's key
and value can be computed again, plus one part of the key that encodes the position (rope) and that
all heads share. The cache stores only these two, so its width does not grow with the number of
heads.

There are two ways to the same result. A prefill has many queries on few keys: its latents are
expanded to keys and values of all heads, and attention proceeds as usual (`latent_prefill.py`). A
decode has few queries on many keys, and to expand them all would cost more than to attend. But a
head's score is query * (w_uk * latent), which is (query * w_uk) * latent. So the query is projected
into the latent space instead, once, and all heads read the cache as one shared head. The average
latent is expanded to a value at the end, once per query.
"""

from dataclasses import replace
from typing import Any

import torch

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.latent_classes import MLADims as MLADims
from ...contract.latent_formats import find_latent_format
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
from ...validation import validated
from ...validation.latent import (
    check_concat_and_cache_mla,
    check_latent_decode_attention,
    check_mla_config,
)
from ..cache.formats.fp8 import quantise
from ..cache.latent_formats import encode_records, gather_latents
from .encoder import encoder_attention
from .latent_gather import gather_latent_cache as gather_latent_cache
from .latent_prefill import latent_prefill_attention as latent_prefill_attention


@validated(check_concat_and_cache_mla)
def concat_and_cache_mla(
    kv_c: Latent,
    k_pe: RopeKey,
    kv_cache: LatentCache,
    slot_mapping: SlotMapping,
    scale: Scale | float | None = None,
) -> None:
    """Write each new token's latent and rope key, one after the other, to its slot.

    Args:
        kv_c: [tokens, kv_lora_rank], any strides (a slice of a fused projection is fine).
        k_pe: [tokens, qk_rope_head_dim], any strides; already rotated.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], modified in place; of
            the same dtype, or FP8. Or [num_blocks, block_size, bytes per record] uint8: 656 bytes
            are the format `fp8_ds_mla`, 352 `nvfp4_ds_mla`, 584 `fp8_ds_mla_v4`.
        slot_mapping: [slots] slot of the first `slots` tokens. Tokens with a negative slot, and
            tokens past the end of the mapping, are not stored.
        scale: What the elements of an FP8 cache will be multiplied by when they are read. If
            None, the cache is not quantised, or its records store scales that the write measures.

    Raises:
        IndexError: A slot is outside the cache.
        ValueError: Shapes or devices do not match, two tokens have one slot, only one of an
            FP8 cache and its scale is given, or records of that many bytes do not have these
            widths.
        TypeError: A dtype is not the expected one.

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
    block_size, form = kv_cache.shape[1], find_latent_format(kv_cache)
    parts = (kv_cache,) if form is None else form.parts(kv_cache)
    if form is not None:
        latents = encode_records(form, kv_c, k_pe)
    else:
        latents = torch.cat([kv_c, k_pe], dim=1)
        if scale is not None:
            latents = quantise(latents, scale, kv_cache.dtype)
    pieces = torch.split(latents, [part.shape[2] for part in parts], dim=1)
    for token, slot in enumerate(slot_mapping.tolist()):
        # step: skip tokens without a slot
        if slot < 0:
            continue
        # step: find block and offset
        block_id, offset = divmod(slot, block_size)
        # step: store the latent and the rope key
        for part, piece in zip(parts, pieces, strict=True):
            part[block_id, offset] = piece[token]


@validated(check_latent_decode_attention)
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
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return causal attention of each new token over its latents in the paged cache.

    For few queries on many keys: decodes, and the drafted tokens of speculative decoding. It takes
    any number of queries per request.

    Args:
        q_nope: [tokens, query_heads, qk_nope_head_dim], request after request: the part of the
            query without position.
        q_pe: [tokens, query_heads, qk_rope_head_dim]: the part with position, already rotated.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], the new tokens'
            latents included. Or records in uint8, as in `concat_and_cache_mla`; queries may have
            any float dtype then.
        w_uk: [query_heads, qk_nope_head_dim, kv_lora_rank], projects a latent to a head's key
            without its rope part.
        w_uv: [query_heads, kv_lora_rank, v_head_dim], projects a latent to a head's value.
        block_table, query_start_loc, seq_lens, max_query_len, max_seq_len: As in
            `paged_attention`.
        scale: Factor of the dot products. If None, 1 / sqrt(qk_nope_head_dim +
            qk_rope_head_dim), by the width of a head's key and not of what is cached.
        out: Optional. [tokens, query_heads, v_head_dim], modified in place. If None, a new tensor
            is returned.
        lse, compute_dtype: As in `paged_attention`.
        options: `sliding_window` (keys that a query attends to, its own included) and `k_scale`
            (what the elements of an FP8 cache are multiplied by, one number for keys and values).

    Returns:
        `out`. Rows past the last request get 0 and the log-sum-exp -inf.

    Raises:
        NotImplementedError: Another option is given.
        IndexError: A length or a block id is outside the table or the cache.
        ValueError: Widths, heads or lengths do not match, a request has more queries than keys,
            or only one of an FP8 cache and its scale is given.
        TypeError: A dtype is not the expected one.

    Source:
        DeepSeek-V2, 2024, section 2.1; vLLM's `MLACommonImpl`, "data-movement friendly" way.

    Example:
        One sequence of two tokens; the second is new. Its query multiplies the second element of
        the latents, 0 and 1, by 1.0986: weights e^0 and e^1.0986, 1 to 3. The value is the first
        element, 8 and 4: a quarter of 8 and three quarters of 4.

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
    if scale is None:
        scale = (q_nope.shape[2] + q_pe.shape[2]) ** -0.5
    dtype, rank = q_nope.dtype, w_uk.shape[2]
    q_nope, q_pe, w_uk, w_uv = (x.to(compute_dtype) for x in (q_nope, q_pe, w_uk, w_uv))
    # step: project the queries into the latent space
    query = torch.cat([torch.einsum("thn,hnl->thl", q_nope, w_uk), q_pe], dim=2)
    # step: attend to the latents as the keys and values of one head
    start_loc = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int()
    whole = (0, int(start_loc[-1]))
    latents = gather_latents(
        kv_cache, block_table, start_loc, *whole, options.k_scale, compute_dtype
    )
    key = latents[:, None]  # one kv head
    average = encoder_attention(
        query,
        key,
        key[..., :rank],
        query_start_loc,
        start_loc,
        max_query_len,
        max_seq_len,
        scale=scale,
        lse=lse,
        compute_dtype=compute_dtype,
        options=replace(options, causal=True, k_scale=None),
    )
    # step: expand each head's average latent to its value
    result = torch.einsum("thl,hlv->thv", average, w_uv)
    return result.to(dtype) if out is None else out.copy_(result)


@typed
def get_mla_dims(hf_text_config: Any) -> MLADims:
    """Return the widths of a model's latent attention.

    Args:
        hf_text_config: text configuration of a Hugging Face model. `q_lora_rank` may be missing
            or None.

    Raises:
        ValueError: a width is missing or below 1.

    Source:
        vLLM's function of that name; DeepSeek-V2, 2024.

    Example:
        >>> from types import SimpleNamespace
        >>> get_mla_dims(SimpleNamespace(
        ...     kv_lora_rank=512,
        ...     qk_nope_head_dim=128,
        ...     qk_rope_head_dim=64,
        ...     v_head_dim=128,
        ... )).cached_width
        576
    """
    check_mla_config(hf_text_config)
    return MLADims(
        q_lora_rank=getattr(hf_text_config, "q_lora_rank", None),
        kv_lora_rank=hf_text_config.kv_lora_rank,
        qk_nope_head_dim=hf_text_config.qk_nope_head_dim,
        qk_rope_head_dim=hf_text_config.qk_rope_head_dim,
        v_head_dim=hf_text_config.v_head_dim,
    )
