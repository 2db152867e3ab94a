"""Multi-head latent attention: the cache holds one latent vector per token.

Projections are matrix products that torch writes to where they are needed. Decode attends to the
latents through `paged_attention` with one kv head, whose values are a view of its keys. So nothing
is copied, and a CUDA graph can capture it. The kernel families of latents recognize this view, and
read a latent once, as key and value. Prefill expands the latents of the context in chunks. A kernel
gathers each chunk and finds the request of each token by bisection. The first token of each request
in a chunk is computed on the device, so the host reads nothing. The results of the chunks are
merged in float32.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.default_modes import are_default, default_modes
from ...contract.latent_classes import MLADims as MLADims
from ...contract.latent_formats import find_latent_format
from ...contract.shapes import (
    BlockTable,
    KeyUpProjection,
    Latent,
    LatentCache,
    LatentRows,
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
from ...reference.attention.latent import get_mla_dims as get_mla_dims
from ...validation import values_checked, values_may_be_checked
from ...validation.latent import (
    check_concat_and_cache_mla,
    check_latent_decode_attention,
    check_latent_prefill_attention,
)
from ...validation.latent_cache import check_gather_latent_cache
from ..dispatch.dispatch import reject_compute_dtype
from ..kernels.fp8 import scale_arguments
from ..kernels.kv_cache import as_bits
from ..kernels.latent_cache import (
    BLOCK_TOKENS,
    LatentSlots,
    NewLatents,
    grid,
    write_latents_kernel,
)
from ..kernels.latent_records.attend import attend_to_records, check_record_queries
from ..kernels.latent_records.launch import (
    gather_latents,
    gather_records,
    is_decoded_in_place,
    write_records,
)
from ..runtime.launcher import check_launch, launch_kernel
from ..runtime.operators import operator
from ..runtime.repeat.writes import WRITES, record_write, sign_write
from .encoder import encoder_attention
from .merge_states import merge_attn_states
from .paged import paged_attention

_CAUSAL = AttentionOptions(causal=True)


@typed
def _check_write_types(
    kv_c: Latent, k_pe: RopeKey, kv_cache: LatentCache, slot_mapping: SlotMapping
) -> None:
    """Raise for another type, other axes, and gradients: a repeated write is not looked at."""


@operator(changed=["kv_cache"], is_repeated=True)
def concat_and_cache_mla(
    kv_c: Latent,
    k_pe: RopeKey,
    kv_cache: LatentCache,
    slot_mapping: SlotMapping,
    scale: Scale | float | None = None,
) -> None:
    """Write each new token's latent and rope key, one after the other, to its slot."""
    write = (kv_c, k_pe), (kv_cache,), slot_mapping, (scale,)
    signature = sign_write(*write)
    repeated = None if signature is None else WRITES.get(signature)
    if repeated is not None and not values_may_be_checked() and repeated.launch(*write):
        return
    contents = values_checked(kv_cache)
    _check_write_types(kv_c, k_pe, kv_cache, slot_mapping)
    check_concat_and_cache_mla(
        kv_c, k_pe, kv_cache, slot_mapping, scale, contents=contents
    )
    check_launch(kv_cache)
    num_slots = slot_mapping.shape[0]
    _, block_size, width = kv_cache.shape
    if not num_slots or not kv_cache.numel():
        return
    form = find_latent_format(kv_cache)
    if form is not None:
        write_records(form, kv_c, k_pe, kv_cache, slot_mapping)
        return
    dtype = kv_cache.dtype
    (kv_cache,) = as_bits(kv_cache)
    if scale is None:
        kv_c, k_pe = as_bits(kv_c, k_pe)
    programs = grid(num_slots, width)
    arguments = (
        NewLatents(kv_c, *kv_c.stride()),
        NewLatents(k_pe, *k_pe.stride()),
        LatentSlots(kv_cache, *scale_arguments(scale), *kv_cache.stride()),
        slot_mapping,
        num_slots,
        slot_mapping.stride(0),
        block_size,
        # RANK, WIDTH, E5M2
        kv_c.shape[1],
        width,
        dtype == torch.float8_e5m2,
    )
    compiled = launch_kernel(write_latents_kernel, programs, *arguments)
    record_write(signature, compiled, BLOCK_TOKENS.value, programs[1], arguments)


@operator(changed=["latents"])
def gather_latent_cache(
    kv_cache: LatentCache,
    latents: LatentRows,
    block_table: BlockTable,
    seq_start_loc: StartLoc,
    scale: Scale | float | None = None,
) -> None:
    """Write the latents and rope keys of whole sequences, concatenated, to rows of numbers."""
    check_gather_latent_cache(
        kv_cache, latents, block_table, seq_start_loc, scale, contents=values_checked(kv_cache)
    )  # fmt: skip
    check_launch(kv_cache)
    starts = seq_start_loc.contiguous()
    if is_decoded_in_place(kv_cache, latents):
        gather_records(kv_cache, block_table, starts, 0, latents)
        return
    # step: gather the latents and rope keys of all sequences as numbers
    rows = gather_latents(
        kv_cache, block_table, starts, 0, len(latents), scale, latents.dtype
    )
    # step: write them, and zeros after the last sequence
    latents.copy_(rows)


@operator(out=["out", "lse"])
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

    Raises:
        NotImplementedError: what `paged_attention` does not compute.
    """
    check_latent_decode_attention(
        q_nope, q_pe, kv_cache, w_uk, w_uv, block_table, query_start_loc, seq_lens,
        max_query_len, max_seq_len, out, lse, options, contents=values_checked(q_nope), scale=scale,
    )  # fmt: skip
    check_launch(kv_cache)
    if scale is None:
        scale = (q_nope.shape[2] + q_pe.shape[2]) ** -0.5
    tokens, heads, _ = q_nope.shape
    form = find_latent_format(kv_cache)
    width, rank = w_uk.shape[2] + q_pe.shape[2], w_uk.shape[2]
    if form is not None:
        if compute_dtype != torch.float32:
            reject_compute_dtype(compute_dtype)
        check_record_queries(q_nope)
    if out is None:
        out = q_nope.new_empty(tokens, heads, w_uv.shape[2])
    # step: project the queries into the latent space
    query = q_nope.new_empty(tokens, heads, width)
    query[..., rank:] = q_pe
    _project(q_nope.transpose(0, 1), w_uk, query[..., :rank].transpose(0, 1))
    # step: attend to the latents as the keys and values of one head
    if form is not None:
        mean = attend_to_records(
            form, query, kv_cache, block_table, query_start_loc, seq_lens, max_query_len,
            max_seq_len, scale, options.sliding_window, lse,
        )  # fmt: skip
    else:
        key_cache = kv_cache[:, :, None]
        if options.k_scale is not None:
            options = replace(options, v_scale=options.k_scale)
        mean = paged_attention(
            query, key_cache, key_cache[..., :rank], block_table, query_start_loc, seq_lens,
            max_query_len, max_seq_len, scale=scale, lse=lse, compute_dtype=compute_dtype,
            options=options,
        )  # fmt: skip
    # step: expand each head's average latent to its value
    _project(mean.transpose(0, 1), w_uv, out.transpose(0, 1))
    return out


@operator(out=["out", "lse"])
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

    Raises:
        NotImplementedError: what `encoder_attention` does not compute.
    """
    check_latent_prefill_attention(
        q_nope, q_pe, kv_c, k_pe, kv_cache, w_uk, w_uv, block_table, query_start_loc,
        seq_lens, max_query_len, max_seq_len, num_context_tokens, max_context_chunk, out,
        lse, options, contents=values_checked(q_nope), scale=scale,
    )  # fmt: skip
    check_launch(kv_cache)
    tokens, heads, _ = q_nope.shape
    if out is None:
        out = q_nope.new_empty(tokens, heads, w_uv.shape[2])
    if lse is None:
        lse = q_nope.new_empty(heads, tokens, dtype=torch.float32)
    nope = q_nope.shape[2]
    query = q_nope.new_empty(tokens, heads, nope + q_pe.shape[2])
    query[..., :nope], query[..., nope:] = q_nope, q_pe
    acc = torch.empty_like(out, dtype=torch.float32)
    # step: expand the new tokens' latents to keys and values
    key, value = _expand(kv_c, k_pe, w_uk, w_uv)
    # step: attend to the new tokens with a causal mask
    encoder_attention(
        query, key, value, query_start_loc, query_start_loc, max_query_len, max_query_len,
        scale=scale, out=acc, lse=lse, compute_dtype=compute_dtype, options=_CAUSAL,
    )  # fmt: skip
    partial, partial_lse = torch.empty_like(acc), torch.empty_like(lse)
    for latents, starts in _context_chunks(
        kv_cache, block_table, seq_lens - query_start_loc.diff(), num_context_tokens,
        max_context_chunk, options.k_scale, query.dtype,
    ):  # fmt: skip
        # step: expand the chunk's latents to keys and values
        rank = kv_c.shape[1]
        key, value = _expand(latents[:, :rank], latents[:, rank:], w_uk, w_uv)
        # step: attend to the whole chunk
        encoder_attention(
            query, key, value, query_start_loc, starts, max_query_len,
            min(len(latents), max_seq_len), scale=scale, out=partial, lse=partial_lse,
            compute_dtype=compute_dtype,
        )  # fmt: skip
        # step: merge its result with the results so far
        merge_attn_states(partial, partial_lse, acc, lse, output=acc, output_lse=lse)
    return out.copy_(acc)


def _project(vectors: Tensor, weights: Tensor, result: Tensor) -> None:
    """Write [heads, tokens, new width] products to `result`, which may have any strides."""
    vectors, weights, result = vectors.detach(), weights.detach(), result.detach()
    product = result
    if result.dtype != weights.dtype:
        product = torch.empty_like(result, dtype=weights.dtype)
    # a product with `out` is not changed by autocast, and the context takes longer than the test
    with nullcontext() if are_default() else default_modes():
        torch.bmm(vectors, weights, out=product)
    if product is not result:
        result.copy_(product)


def _expand(
    latent: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of every head: [tokens, heads, head size]."""
    heads, nope, _ = w_uk.shape
    tokens = latent.shape[0]
    key = latent.new_empty(tokens, heads, nope + k_pe.shape[1])
    key[..., nope:] = k_pe[:, None]
    value = latent.new_empty(heads, tokens, w_uv.shape[2])
    for_each_head = latent.expand(heads, -1, -1)
    _project(for_each_head, w_uk.transpose(1, 2), key[..., :nope].transpose(0, 1))
    _project(for_each_head, w_uv, value)
    return key, value.transpose(0, 1)


def _context_chunks(
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    num_context_tokens: int,
    max_chunk: int | None,
    k_scale: Tensor | float | None,
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the context of all requests, concatenated, in chunks.

    Args:
        context_lens: [reqs] cached tokens per request.
        num_context_tokens: their sum, or more.
        max_chunk: tokens per chunk. If None, there is one chunk.
        k_scale: factor of the numbers of an FP8 cache. If None, the cache is not quantised, or
            has records.
        dtype: dtype of dequantised latents.

    Yields:
        latents: [chunk, latent_width], 0 past the last sequence.
        starts: [reqs + 1] first token of each request in the chunk.
    """
    context_start_loc = torch.nn.functional.pad(
        context_lens.cumsum(0, dtype=torch.int32), (1, 0)
    )
    chunk = num_context_tokens if max_chunk is None else max_chunk
    for begin in range(0, num_context_tokens, max(chunk, 1)):
        # step: gather the next chunk of the context
        rows = min(chunk, num_context_tokens - begin)
        latents = gather_latents(
            kv_cache, block_table, context_start_loc, begin, rows, k_scale, dtype
        )
        yield latents, (context_start_loc - begin).clamp(0, rows)
