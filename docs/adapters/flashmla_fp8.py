"""Adapter for FlashMLA over records of fp8_ds_mla: 512 codes, 4 scales and 64 rope elements.

Calls the operator `sparse_decode_fwd` of vLLM's `_flashmla_C.abi3.so`, which needs nothing else of
vLLM. The variable PAGETWIN_FLASHMLA names the file. The kernel gets the slots of a token's keys, so
each token is a request of its own, and a window is a choice of slots. Queries are bfloat16 and have
64 or 128 heads: missing ones are 0.
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
DECODE = torch.ops._flashmla_C.sparse_decode_fwd
RANK = 512
HEADS = (64, 128)
MULTIPLE = 64
"""Slots of a token come in so many; -1 is none."""
SUPPORT = Support(
    operations=["latent_decode_attention"],
    devices=["sm_90"],
    dtypes=["bfloat16"],
    cache_dtypes=["fp8_ds_mla"],
    block_sizes=[64],
    options=["scale", "out", "lse", "sliding_window"],
    rejects=[],
)


def latent_decode_attention(
    q_nope,  # [tokens, query_heads, qk_nope_head_dim]
    q_pe,  # [tokens, query_heads, 64]
    kv_cache,  # [num_blocks, 64, 656] uint8
    w_uk,  # [query_heads, qk_nope_head_dim, 512]
    w_uv,  # [query_heads, 512, v_head_dim]
    block_table,  # [reqs, max_blocks]
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,  # [tokens, query_heads, v_head_dim]
    lse=None,  # [query_heads, tokens] natural
    sliding_window=None,
):
    """Return attention of each new token over its latents."""
    tokens, heads, nope = q_nope.shape
    out = q_nope.new_empty(tokens, heads, w_uv.shape[2]) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    rows = int(query_start_loc[-1])
    if not rows or not max_seq_len:
        return out
    slots = slots_of(
        kv_cache, block_table, query_start_loc, seq_lens, max_seq_len, sliding_window
    )

    # step: project the queries into the space of the latents
    latent = torch.einsum("thn,hnl->thl", q_nope[:rows].double(), w_uk.double())
    query = torch.cat([latent.to(q_nope.dtype), q_pe[:rows]], dim=2)
    more = next(count for count in HEADS if count >= heads) - heads
    query = torch.nn.functional.pad(query, (0, 0, 0, more))[:, None].contiguous()
    scale = (nope + q_pe.shape[2]) ** -0.5 if scale is None else scale

    # step: attend
    records = kv_cache.contiguous()[:, :, None]
    found, natural, *_ = DECODE(
        query, records, slots[:, None], None, None, None, None, None, None, None, RANK,
        float(scale), None, False,
    )  # fmt: skip

    # step: expand each head's average latent to its value
    has_keys = (slots >= 0).any(1)
    average = found[:, 0, :heads].double().where(has_keys[:, None, None], 0)
    out[:rows] = torch.einsum("thl,hlv->thv", average, w_uv.double()).to(out.dtype)
    if lse is not None:
        of_keys = natural.view(rows, -1)[:, :heads].where(has_keys[:, None], -torch.inf)
        lse[:, :rows] = of_keys.T
    return out


def slots_of(
    kv_cache, block_table, query_start_loc, seq_lens, max_seq_len, sliding_window
):
    """Return [tokens, slots] int32 the slots of each token's keys, then -1."""
    size, device = kv_cache.shape[1], kv_cache.device
    starts = query_start_loc.long()
    token = torch.arange(int(starts[-1]), device=device)
    req = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    position = seq_lens.long()[req] - starts[req + 1] + token
    columns = -(-max_seq_len // MULTIPLE) * MULTIPLE
    key = torch.arange(columns, device=device)[None]
    visible = key <= position[:, None]
    if sliding_window is not None:
        visible &= key > position[:, None] - sliding_window
    entry = (key // size).clamp(max=block_table.shape[1] - 1)
    slots = block_table[req].long().gather(1, entry.expand(len(token), -1)) * size
    return torch.where(visible, slots + key % size, -1).int()
