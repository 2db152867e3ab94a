"""Adapter for FlashInfer's latent attention (MLA) over pages of latents.

The wrapper is planned for each call. It has latents of 512 elements and rope keys of 64: narrower
ones are placed in their first columns, and the other columns are 0. The variable
PAGETWIN_FLASHINFER_BACKEND is "fa2", the default, or "fa3".
"""

import math
import os

import torch
from flashinfer_paged import flashinfer, listed
from pagetwin.conformance import Support

RANK, ROPE = 512, 64
BACKEND = os.environ.get("PAGETWIN_FLASHINFER_BACKEND", "fa2")
SUPPORT = Support(
    operations=["latent_decode_attention"],
    devices=["sm_90"],
    dtypes=["bfloat16"],
    cache_dtypes=["bfloat16"],
    block_sizes=[1, 16, 32, 64],
    query_lens=range(129),
    options=["scale", "out", "lse"],
    rejects=[],
)


def widened(tensor, width):
    """Return a tensor whose last axis has zeros after its own elements."""
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])).contiguous()


def latent_decode_attention(
    q_nope,  # [tokens, query_heads, qk_nope_head_dim]
    q_pe,  # [tokens, query_heads, qk_rope_head_dim]
    kv_cache,  # [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]
    w_uk,  # [query_heads, qk_nope_head_dim, kv_lora_rank]
    w_uv,  # [query_heads, kv_lora_rank, v_head_dim]
    block_table,  # [reqs, max_blocks]
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,  # [tokens, query_heads, v_head_dim]
    lse=None,  # [query_heads, tokens] natural
):
    """Return attention of each new token over its latents."""
    tokens, heads, nope = q_nope.shape
    rank, block_size = w_uk.shape[2], kv_cache.shape[1]
    out = q_nope.new_empty(tokens, heads, w_uv.shape[2]) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    batch = listed(block_table, query_start_loc, seq_lens, block_size)
    if batch is None:
        return out
    own = batch.tokens

    # step: project the queries into the space of the latents
    latent = torch.einsum("thn,hnl->thl", q_nope[own].double(), w_uk.double())
    queries = widened(latent.to(q_nope.dtype), RANK), widened(q_pe[own], ROPE)
    caches = widened(kv_cache[..., :rank], RANK), widened(kv_cache[..., rank:], ROPE)

    # step: attend
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q_nope.device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=BACKEND)
    wrapper.plan(
        qo_indptr=batch.starts,
        kv_indptr=batch.block_starts,
        kv_indices=batch.blocks,
        kv_len_arr=batch.lens,
        num_heads=heads,
        head_dim_ckv=RANK,
        head_dim_kpe=ROPE,
        page_size=block_size,
        causal=True,
        sm_scale=(nope + q_pe.shape[2]) ** -0.5 if scale is None else scale,
        q_data_type=q_nope.dtype,
        kv_data_type=kv_cache.dtype,
        lse_mode="base2",
    )
    found, base_2 = wrapper.run(*queries, *caches, return_lse=True)

    # step: expand each head's average latent to its value
    average = found[..., :rank].double()
    out[own] = torch.einsum("thl,hlv->thv", average, w_uv.double()).to(out.dtype)
    if lse is not None:
        lse[:, own] = base_2.T * math.log(2)  # [tokens, query_heads]
    return out
