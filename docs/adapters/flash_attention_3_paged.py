"""Adapter for FlashAttention-3 with a paged cache.

Calls the operator `fwd` of vLLM's `_vllm_fa3_C.abi3.so`, which needs nothing else of vLLM. Its
arguments are bound by the names in its schema. The variable PAGETWIN_FA3 names the file. By default
it is that of an installed vLLM.
"""

import importlib.util
import os
from pathlib import Path

import torch
from pagetwin.conformance import flash_attention_like


def find_operators():
    """Return the path of the operators."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [
        os.environ.get("PAGETWIN_FA3"),
        *(Path(folder, "vllm_flash_attn", "_vllm_fa3_C.abi3.so") for folder in folders),
    ]
    for file in files:
        if file is not None and Path(file).is_file():
            return str(file)
    raise ImportError(
        "this adapter needs FlashAttention-3 and a GPU of compute capability 9: pip install"
        " vllm, or set PAGETWIN_FA3 to the path of its _vllm_fa3_C.abi3.so"
    )


torch.ops.load_library(find_operators())
FORWARD = torch.ops._vllm_fa3_C.fwd
SETTINGS = {
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "attention_chunk": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
SUPPORT = flash_attention_like(
    devices=["sm_90"],
    options={
        "scale": None,
        "out": None,
        "lse": None,
        "causal": "bool",  # one flag for all requests
        "sliding_window": None,
        "logits_soft_cap": None,
        "sinks": None,
    },
    tensor_dtypes={"sinks": ["bfloat16"]},
    reads_past=["block_table"],
)


def paged_attention(
    query,  # [tokens, query_heads, head_size]
    key_cache,  # [num_blocks, block_size, kv_heads, head_size]
    value_cache,
    block_table,  # [reqs, max_blocks]
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,
    lse=None,  # [query_heads, tokens] natural
    causal=True,
    sliding_window=None,
    logits_soft_cap=None,
    sinks=None,  # [query_heads] bfloat16
):
    """Return attention of each new token over its sequence in the paged cache."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    tokens = int(query_start_loc[-1])
    if not tokens:
        return out
    # its prefetch reads entries past the end of a row: each must be a valid block id
    columns = torch.arange(block_table.shape[1], device=query.device)
    owned = columns < -(-seq_lens // key_cache.shape[1])[:, None]
    left = -1 if sliding_window is None else sliding_window - 1
    arguments = SETTINGS | {
        "q": query[:tokens],
        "k": key_cache,
        "v": value_cache,
        "cu_seqlens_q": query_start_loc,
        "seqused_k": seq_lens,
        "max_seqlen_q": max_query_len,
        "max_seqlen_k": max_seq_len,
        "page_table": torch.where(owned, block_table, 0),
        "softmax_scale": query.shape[2] ** -0.5 if scale is None else scale,
        "is_causal": causal,
        "window_size_left": left,
        "window_size_right": 0 if causal and left >= 0 else left,
        "softcap": logits_soft_cap or 0.0,
        "s_aux": sinks,
    }
    names = [argument.name for argument in FORWARD.default._schema.arguments]

    # step: attend
    result, natural, *_ = FORWARD(*(arguments.get(name) for name in names))
    out[:tokens] = result
    if lse is not None:
        # [query_heads, tokens]; without keys it is infinite, with a sink too
        empty = -torch.inf if sinks is None else sinks.float()[:, None]
        lse[:, :tokens] = torch.where(natural.isinf(), empty, natural)
    return out
