"""Multi-head latent attention: the cache holds one latent vector per token.

Projections are products of torch's, written to where they are needed. Attention to the latents is
`paged_attention` with one kv head, whose values are a view of its keys: nothing is copied, and a
captured graph can hold it. A prompt's chunks are gathered by a kernel that finds each token's
request by bisection; where requests begin in a chunk is computed on the device, so nothing is read
by the host. Chunks are joined in float32, however many there are. Addresses are 64-bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from ...validation import values_checked
from ...validation.latent import (
    check_concat_and_cache_mla,
    check_latent_decode_attention,
    check_latent_prefill_attention,
)
from ..cache.cache_ops import as_bits
from ..cache.slot_mapping import find_request
from ..kernels.fp8 import encode_fp8, load_scale, scale_arguments
from ..launch.launcher import check_launch
from ..launch.operators import operator
from .encoder import encoder_attention
from .merge_states import merge_attn_states
from .paged import paged_attention

TOKENS_PER_PROGRAM = 16
ELEMENTS_PER_PROGRAM = 64


@operator(changed=["kv_cache"])
def concat_and_cache_mla(
    kv_c: Latent,
    k_pe: RopeKey,
    kv_cache: LatentCache,
    slot_mapping: SlotMapping,
    scale: Scale | float | None = None,
) -> None:
    """Write each new token's latent and rope key, one behind the other, to its slot."""
    check_concat_and_cache_mla(
        kv_c, k_pe, kv_cache, slot_mapping, scale, contents=values_checked()
    )
    check_launch(kv_cache)
    num_slots = slot_mapping.shape[0]
    _, block_size, width = kv_cache.shape
    if not num_slots or not kv_cache.numel():
        return
    dtype = kv_cache.dtype
    (kv_cache,) = as_bits(kv_cache)
    if scale is None:
        kv_c, k_pe = as_bits(kv_c, k_pe)
    _write_kernel[_grid(num_slots, width)](
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping,
        *scale_arguments(scale),
        num_slots,
        block_size,
        slot_mapping.stride(0),
        *kv_c.stride(),
        *k_pe.stride(),
        *kv_cache.stride(),
        RANK=kv_c.shape[1],
        WIDTH=width,
        E5M2=dtype == torch.float8_e5m2,
        TOKENS=TOKENS_PER_PROGRAM,
        ELEMENTS=ELEMENTS_PER_PROGRAM,
    )


@triton.jit(do_not_specialize=["num_slots"])
def _write_kernel(
    kv_c,
    k_pe,
    kv_cache,
    slot_mapping,
    scale,
    scale_stride,
    num_slots,
    block_size,
    mapping_stride,
    latent_stride_token,
    latent_stride_element,
    rope_stride_token,
    rope_stride_element,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_element,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    E5M2: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    slot = tl.load(
        slot_mapping + token * mapping_stride, mask=token < num_slots, other=-1
    )
    # step: skip tokens without a slot
    stored = (slot >= 0)[:, None] & (element < WIDTH)[None, :]
    # step: find block and offset
    block_id, offset = slot // block_size, slot % block_size
    # step: store the latent and the rope key
    is_latent = (element < RANK)[None, :]
    place = (token * latent_stride_token)[:, None]
    place += (element * latent_stride_element)[None, :]
    moved = tl.load(kv_c + place, mask=stored & is_latent, other=0)
    place = (token * rope_stride_token)[:, None]
    place += ((element - RANK) * rope_stride_element)[None, :]
    rope = tl.load(k_pe + place, mask=stored & (element >= RANK)[None, :], other=0)
    moved = tl.where(is_latent, moved, rope)
    if scale is not None:
        # the reference divides exactly, and so does this
        divisor = load_scale(scale, scale_stride, 0, True)
        moved = encode_fp8(tl.div_rn(moved.to(tl.float32), divisor), E5M2)
    place = (block_id * cache_stride_block + offset * cache_stride_slot)[:, None]
    place += (element * cache_stride_element)[None, :]
    tl.store(kv_cache + place, moved, mask=stored)


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
    sliding_window: int | None = None,
    k_scale: Scale | float | None = None,
) -> Output:
    """Return causal attention of each new token over its latents in the paged cache.

    Raises:
        NotImplementedError: what `paged_attention` does not compute.
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
        contents=values_checked(),
    )
    check_launch(kv_cache)
    if scale is None:
        scale = (q_nope.shape[2] + q_pe.shape[2]) ** -0.5
    tokens, heads, _ = q_nope.shape
    width, rank = kv_cache.shape[2], w_uk.shape[2]
    if out is None:
        out = q_nope.new_empty(tokens, heads, w_uv.shape[2])
    # step: carry the queries into the space of the latents
    query = q_nope.new_empty(tokens, heads, width)
    query[..., rank:] = q_pe
    _project(q_nope.transpose(0, 1), w_uk, query[..., :rank].transpose(0, 1))
    # step: attend to them as to the keys and values of one head
    key_cache = kv_cache[:, :, None]
    mean = paged_attention(
        query,
        key_cache,
        key_cache[..., :rank],
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        scale=scale,
        lse=lse,
        compute_dtype=compute_dtype,
        options=AttentionOptions(
            sliding_window=sliding_window, k_scale=k_scale, v_scale=k_scale
        ),
    )
    # step: expand each head's mean latent to its value
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
    k_scale: Scale | float | None = None,
) -> Output:
    """Return causal attention of each new token over its sequence, expanded from its latents.

    Raises:
        NotImplementedError: what `encoder_attention` does not compute.
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
        contents=values_checked(),
    )
    check_launch(kv_cache)
    tokens, heads, _ = q_nope.shape
    if out is None:
        out = q_nope.new_empty(tokens, heads, w_uv.shape[2])
    if lse is None:
        lse = q_nope.new_empty(heads, tokens, dtype=torch.float32)
    rank = kv_c.shape[1]
    query = torch.cat([q_nope, q_pe], dim=2)
    total = torch.empty_like(out, dtype=torch.float32)
    # step: expand the new tokens' latents to keys and values
    key, value = _expand(kv_c, k_pe, w_uk, w_uv)
    # step: attend to the new tokens, each up to itself
    encoder_attention(
        query,
        key,
        value,
        query_start_loc,
        query_start_loc,
        max_query_len,
        max_query_len,
        scale=scale,
        out=total,
        lse=lse,
        compute_dtype=compute_dtype,
        options=AttentionOptions(causal=True),
    )
    context_lens = seq_lens - query_start_loc.diff()
    context_start_loc = torch.nn.functional.pad(
        context_lens.cumsum(0, dtype=torch.int32), (1, 0)
    )
    part, part_lse = torch.empty_like(total), torch.empty_like(lse)
    chunk = num_context_tokens if max_context_chunk is None else max_context_chunk
    for begin in range(0, num_context_tokens, max(chunk, 1)):
        # step: gather the next chunk of the context
        rows = min(chunk, num_context_tokens - begin)
        latents = _gather(kv_cache, block_table, context_start_loc, begin, rows)
        if k_scale is not None:
            latents = (latents.float() * k_scale).to(query.dtype)
        starts = (context_start_loc - begin).clamp(0, rows)
        # step: expand its latents to keys and values
        key, value = _expand(latents[:, :rank], latents[:, rank:], w_uk, w_uv)
        # step: attend to all of it
        encoder_attention(
            query,
            key,
            value,
            query_start_loc,
            starts,
            max_query_len,
            min(rows, max_seq_len),
            scale=scale,
            out=part,
            lse=part_lse,
            compute_dtype=compute_dtype,
        )
        # step: join it with what is there
        merge_attn_states(part, part_lse, total, lse, output=total, output_lse=lse)
    return out.copy_(total)


def _project(vectors: Tensor, weights: Tensor, result: Tensor) -> None:
    """Write [heads, tokens, new width] products to `result`, whatever its strides."""
    with torch.no_grad():
        if result.dtype == weights.dtype:
            torch.bmm(vectors, weights, out=result)
        else:
            result.copy_(torch.bmm(vectors, weights))


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


def _gather(
    kv_cache: Tensor,
    block_table: Tensor,
    start_loc: Tensor,
    begin: int,
    num_tokens: int,
) -> Tensor:
    """Return [num_tokens, latent_width] latents of a line of sequences, from `begin` on.

    What lies past the last sequence is zero.
    """
    _, block_size, width = kv_cache.shape
    num_reqs = block_table.shape[0]
    latents = kv_cache.new_empty(num_tokens, width)
    if latents.numel():
        _gather_kernel[_grid(num_tokens, width)](
            *as_bits(kv_cache, latents),
            block_table,
            start_loc,
            begin,
            num_tokens,
            block_size,
            num_reqs,
            num_reqs.bit_length(),
            *block_table.stride(),
            *kv_cache.stride(),
            WIDTH=width,
            TOKENS=TOKENS_PER_PROGRAM,
            ELEMENTS=ELEMENTS_PER_PROGRAM,
        )
    return latents


def _grid(tokens: int, width: int) -> tuple[int, int]:
    """Return how many programs move a tile of tokens by elements each."""
    return (
        triton.cdiv(tokens, TOKENS_PER_PROGRAM),
        triton.cdiv(width, ELEMENTS_PER_PROGRAM),
    )


@triton.jit(
    do_not_specialize=[
        "begin",
        "num_tokens",
        "num_reqs",
        "num_halvings",
        "table_stride_req",
    ]
)
def _gather_kernel(
    kv_cache,
    latents,
    block_table,
    start_loc,
    begin,
    num_tokens,
    block_size,
    num_reqs,
    num_halvings,
    table_stride_req,
    table_stride_entry,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_element,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    token = begin + row
    req = find_request(start_loc, token, num_reqs, num_halvings)
    owned = (row < num_tokens) & (req < num_reqs)
    position = token - tl.load(start_loc + req, mask=owned, other=0)
    entry = (position // block_size).to(tl.int64) * table_stride_entry
    entry += req.to(tl.int64) * table_stride_req
    block_id = tl.load(block_table + entry, mask=owned, other=0).to(tl.int64)
    offset = (position % block_size).to(tl.int64)
    place = (block_id * cache_stride_block + offset * cache_stride_slot)[:, None]
    place += (element * cache_stride_element)[None, :]
    is_element = (element < WIDTH)[None, :]
    moved = tl.load(kv_cache + place, mask=owned[:, None] & is_element, other=0)
    place = (row.to(tl.int64) * WIDTH)[:, None] + element[None, :]
    tl.store(latents + place, moved, mask=(row < num_tokens)[:, None] & is_element)
