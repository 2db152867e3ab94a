"""Adapter for FlashAttention-3 over blocks of one slot: attention over selected keys.

Calls the operator `fwd` of vLLM's `_vllm_fa3_C.abi3.so` with the slots of a token as its block
table. The variable PAGETWIN_FA3 names the file. Of latents, the rope keys are keys, the others are
values, and the query is split in the same way (`q_v`).
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
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
SUPPORT = Support(
    operations=["sparse_attention"],
    devices=["sm_90"],
    dtypes=["float16", "bfloat16"],
    cache_dtypes=["float16", "bfloat16"],
    head_sizes=[*range(8, 257, 8), 576],
    tensor_dtypes={"sinks": ["bfloat16"]},
    options={
        "scale": None,
        "out": None,
        "lse": None,
        "logits_soft_cap": None,
        "sinks": None,
        "value_head_size": [512],
    },
    rejects=[],
)


def sparse_attention(
    query,  # [tokens, query_heads, head_size]
    key_cache,  # [num_blocks, block_size, kv_heads, head_size]
    value_cache,  # [num_blocks, block_size, kv_heads, value_head_size]
    slots,  # [tokens, selected]
    scale=None,
    out=None,  # [tokens, query_heads, value_head_size]
    lse=None,  # [query_heads, tokens] natural
    logits_soft_cap=None,
    sinks=None,  # [query_heads] bfloat16
):
    """Return attention of each token over the keys of its slots."""
    tokens, heads, width = query.shape
    rank = value_cache.shape[3]
    out = query.new_empty(tokens, heads, rank) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
        if sinks is not None:
            lse.copy_(sinks.float()[:, None].expand_as(lse))
    lens = (slots >= 0).sum(1, dtype=torch.int32)
    if not tokens or not int(lens.sum()):
        return out

    # step: move the entries without a slot to the end, in the order of the others
    order = (slots < 0).int().argsort(dim=1, stable=True)
    table = slots.gather(1, order).clamp(min=0)

    # step: see each slot as a block
    keys, values = (cache.flatten(0, 1)[:, None] for cache in (key_cache, value_cache))
    arguments = SETTINGS | {
        "q": query,
        "k": keys,
        "v": values,
        "cu_seqlens_q": torch.arange(
            tokens + 1, dtype=torch.int32, device=query.device
        ),
        "seqused_k": lens,
        "max_seqlen_q": 1,
        "max_seqlen_k": slots.shape[1],
        "page_table": table,
        "softmax_scale": width**-0.5 if scale is None else scale,
        "softcap": logits_soft_cap or 0.0,
        "s_aux": sinks,
    }
    if rank < width:
        arguments["k"] = keys[..., rank:]
        arguments["q"] = query[..., rank:].contiguous()
        arguments["q_v"] = query[..., :rank].contiguous()
    names = [argument.name for argument in FORWARD.default._schema.arguments]

    # step: attend
    found, natural, *_ = FORWARD(*(arguments.get(name) for name in names))
    out.copy_(found)
    if lse is not None:
        # [query_heads, tokens]; without keys it is infinite, with a sink too
        empty = -torch.inf if sinks is None else sinks.float()[:, None]
        lse.copy_(torch.where(natural.isinf(), empty, natural))
    return out
