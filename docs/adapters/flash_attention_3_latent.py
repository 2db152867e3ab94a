"""Adapter for FlashAttention-3's latent decode: a second query for the values' space.

Calls the operator `fwd` of vLLM's `_vllm_fa3_C.abi3.so` with rope keys as keys, latents as values
and the projected queries as `q_v`. The variable PAGETWIN_FA3 names the file. The kernel has latents
of 512 elements and rope keys of 64: narrower ones are placed in their first columns, and the other
columns are 0.
"""

import os
from pathlib import Path

import torch
from pagetwin.conformance import Support

FILE = os.environ.get("PAGETWIN_FA3", "")
if not Path(FILE).is_file():
    raise ImportError(
        "this adapter needs FlashAttention-3 and a GPU of compute capability 9: set PAGETWIN_FA3"
        " to the path of vLLM's _vllm_fa3_C.abi3.so"
    )
torch.ops.load_library(FILE)
FORWARD = torch.ops._vllm_fa3_C.fwd
SETTINGS = {
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
RANK, ROPE = 512, 64
SUPPORT = Support(
    operations=["latent_decode_attention"],
    devices=["sm_90"],
    dtypes=["float16", "bfloat16"],
    cache_dtypes=["float16", "bfloat16"],
    query_lens=range(129),
    block_sizes=[16, 32, 64, 128],
    options=["scale", "out", "lse"],
    reads_past=["block_table"],
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
    rank = w_uk.shape[2]
    out = q_nope.new_empty(tokens, heads, w_uv.shape[2]) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    tokens = int(query_start_loc[-1])
    if not tokens:
        return out

    # step: project the queries into the space of the latents
    latent = torch.einsum("thn,hnl->thl", q_nope[:tokens].double(), w_uk.double())
    # it reads entries past the end of a row: each must be a valid block id
    columns = torch.arange(block_table.shape[1], device=q_nope.device)
    owned = columns < -(-seq_lens // kv_cache.shape[1])[:, None]
    arguments = SETTINGS | {
        "q": widened(q_pe[:tokens], ROPE),
        "k": widened(kv_cache[:, :, None, rank:], ROPE),
        "v": widened(kv_cache[:, :, None, :rank], RANK),
        "q_v": widened(latent.to(q_nope.dtype), RANK),
        "cu_seqlens_q": query_start_loc,
        "seqused_k": seq_lens,
        "max_seqlen_q": max_query_len,
        "max_seqlen_k": max_seq_len,
        "page_table": torch.where(owned, block_table, 0),
        "softmax_scale": (nope + q_pe.shape[2]) ** -0.5 if scale is None else scale,
    }
    names = [argument.name for argument in FORWARD.default._schema.arguments]

    # step: attend
    found, natural, *_ = FORWARD(*(arguments.get(name) for name in names))

    # step: expand each head's average latent to its value
    average = found[:, :, :rank].double()
    out[:tokens] = torch.einsum("thl,hlv->thv", average, w_uv.double()).to(out.dtype)
    if lse is not None:
        # [query_heads, tokens]; without keys it is infinite
        lse[:, :tokens] = torch.where(natural.isinf(), -torch.inf, natural)
    return out
