"""Adapter for vLLM's Triton kernels over caches with a scale per token and head.

`triton_reshape_and_cache_flash_per_token_head_quant` writes int8, FP8 and int4, `unified_attention`
reads them. The kernels are causal, do not write a log-sum-exp, and read the block table one tile at
a time, so entries past the end of a row must be valid block ids. Without vLLM's compiled operators
int4 is rotated by its Triton kernel, in bfloat16.
"""

import torch
from pagetwin.conformance import vllm_like

try:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_per_token_head_quant as write,
    )
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode
except ImportError as error:
    raise ImportError(
        "this adapter needs vLLM 0.33 and a GPU: pip install vllm"
    ) from error

MODES = {
    torch.int8: KVQuantMode.INT8_PER_TOKEN_HEAD,
    torch.float8_e4m3fn: KVQuantMode.FP8_PER_TOKEN_HEAD,
    torch.uint8: KVQuantMode.INT4_PER_TOKEN_HEAD,
}
TENSORS = ["query", "key", "value", "key_cache", "value_cache", "block_table", "out"]
LENGTHS = ["query_start_loc", "seq_lens", "slot_mapping"]
SUPPORT = vllm_like(
    operations=["paged_attention", "reshape_and_cache"],
    cache_dtypes=["int8", "float8_e4m3fn", "uint8"],
    head_sizes=[64, 80, 96, 128, 256],
    kv_layouts=None,  # the kernels get the strides of blocks, slots and heads
    strides=dict.fromkeys(TENSORS, "rows") | dict.fromkeys(LENGTHS, "packed"),
    options={
        "scale": None,
        "out": None,
        "sliding_window": None,
        "logits_soft_cap": None,
        "alibi_slopes": None,
        "sinks": None,
        "k_scale": "per slot",
        "v_scale": "per slot",
    },
    # its ALiBi bias differs by a constant per query, except in the weight of a sink
    never_together=[("alibi_slopes", "sinks")],
    reads_past=["block_table"],
)


def reshape_and_cache(
    key,  # [tokens, kv_heads, head_size]
    value,
    key_cache,  # [num_blocks, block_size, kv_heads, elements]
    value_cache,
    slot_mapping,  # [tokens] int64, -1 for a token that is not stored
    k_scale,  # [num_blocks, block_size, kv_heads] float32
    v_scale,
):
    """Write codes and scales of keys and values into their slots."""
    if len(slot_mapping):
        new, caches = (key, value), (key_cache, value_cache)
        mode = MODES[key_cache.dtype]
        write(*new, *caches, k_scale, v_scale, slot_mapping, mode)


def paged_attention(
    query,  # [tokens, query_heads, head_size]
    key_cache,  # [num_blocks, block_size, kv_heads, elements]
    value_cache,
    block_table,  # [reqs, max_blocks]
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,
    sliding_window=None,
    logits_soft_cap=None,
    alibi_slopes=None,  # [query_heads] float32
    sinks=None,  # [query_heads]
    k_scale=None,  # [num_blocks, block_size, kv_heads] float32
    v_scale=None,
    spans=None,  # more arguments of the kernel: see vllm_spans.py
):
    """Return attention of each new token over the numbers that its cache's codes mean."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    tokens = int(query_start_loc[-1])
    if not tokens:
        return out
    columns = torch.arange(block_table.shape[1], device=query.device)
    owned = columns < -(-seq_lens // key_cache.shape[1])[:, None]
    given = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    unified_attention(
        q=query[:tokens],
        k=key_cache,
        v=value_cache,
        out=out[:tokens],
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max_query_len,
        seqused_k=seq_lens,
        max_seqlen_k=max_seq_len,
        softmax_scale=query.shape[2] ** -0.5 if scale is None else scale,
        causal=True,
        block_table=torch.where(owned, block_table, 0),
        softcap=logits_soft_cap or 0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.contiguous(),
        sinks=None if sinks is None else sinks.contiguous(),
        kv_quant_mode=MODES[key_cache.dtype],
        k_scale_cache=k_scale,
        v_scale_cache=v_scale,
        **given | (spans or {}),
    )
    return out
