"""Adapter for FlashMLA's dense decode over a paged cache of latents.

Calls the operator `dense_decode_fwd` of vLLM's `_flashmla_C.abi3.so`, which needs nothing else of
vLLM. The variable PAGETWIN_FLASHMLA names the file. The kernel has latents of 512 elements and rope
keys of 64: narrower ones are placed in their first columns, and the other columns are 0.
"""

import os
from pathlib import Path

import torch
from pagetwin.conformance import Support

FILE = os.environ.get("PAGETWIN_FLASHMLA", "")
if not Path(FILE).is_file():
    raise ImportError(
        "this adapter needs FlashMLA and a GPU of compute capability 9: set PAGETWIN_FLASHMLA to"
        " the path of vLLM's _flashmla_C.abi3.so"
    )
torch.ops.load_library(FILE)
DECODE = torch.ops._flashmla_C.dense_decode_fwd
RANK, ROPE = 512, 64
SUPPORT = Support(
    operations=["latent_decode_attention"],
    devices=["sm_90"],
    dtypes=["float16", "bfloat16"],
    cache_dtypes=["float16", "bfloat16"],
    block_sizes=[64],
    query_lens=range(2),
    options=["scale", "out", "lse"],
    reads_past=["block_table"],
    rejects=[],
)


def widened(tensor, rank):
    """Return latents or queries as rows of 576 elements, those of the rope part at the end."""
    wide = tensor.new_zeros(*tensor.shape[:-1], RANK + ROPE)
    wide[..., :rank] = tensor[..., :rank]
    wide[..., RANK : RANK + tensor.shape[-1] - rank] = tensor[..., rank:]
    return wide


def latent_decode_attention(
    q_nope,  # [tokens, query_heads, qk_nope_head_dim]
    q_pe,  # [tokens, query_heads, qk_rope_head_dim]
    kv_cache,  # [num_blocks, 64, kv_lora_rank + qk_rope_head_dim]
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
    """Return attention of one new token of each request over its latents."""
    tokens, heads, nope = q_nope.shape
    rank = w_uk.shape[2]
    out = q_nope.new_empty(tokens, heads, w_uv.shape[2]) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    # step: leave out requests without a new token
    rows = query_start_loc.diff().nonzero().flatten()
    if not len(rows):
        return out
    own = query_start_loc[:-1][rows].long()

    # step: project the queries into the space of the latents
    latent = torch.einsum("thn,hnl->thl", q_nope[own].double(), w_uk.double())
    query = torch.cat([latent.to(q_nope.dtype), q_pe[own]], dim=2)
    scale = (nope + q_pe.shape[2]) ** -0.5 if scale is None else scale
    # it reads entries past the end of a row: each must be a valid block id
    columns = torch.arange(block_table.shape[1], device=q_nope.device)
    owned = columns < -(-seq_lens[rows] // kv_cache.shape[1])[:, None]
    table = torch.where(owned, block_table[rows], 0)

    # step: attend
    given = [widened(query, rank)[:, None], widened(kv_cache, rank)[:, :, None], RANK]
    given += [seq_lens[rows], table, float(scale), True, None, None]
    given += [None] * (len(DECODE.default._schema.arguments) - len(given))
    found, natural, *_ = DECODE(*given)

    # step: expand each head's average latent to its value
    average = found[:, 0, :, :rank].double()
    out[own] = torch.einsum("thl,hlv->thv", average, w_uv.double()).to(out.dtype)
    if lse is not None:
        lse[:, own] = natural[:, :, 0].T  # [reqs, query_heads, 1]
    return out
