"""Adapter for vLLM's Triton kernel, `unified_attention`.

The kernel is causal, does not write a log-sum-exp, and reads the block table one tile at a time. So
entries past the end of a row must be valid block ids. Slopes and sinks are packed, as vLLM's are.
Its ALiBi bias counts from the end of the context instead of the query's position. The difference is
a constant per query, which softmax cancels, except in the weight of a sink. So slopes and sinks are
not declared together.
"""

import torch
from pagetwin.conformance import vllm_like

try:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
except ImportError as error:
    raise ImportError("this adapter needs vLLM and a GPU: pip install vllm") from error

# float16 and bfloat16 only: float32 products would be rounded to TF32
SUPPORT = vllm_like(
    head_sizes=[64, 80, 96, 128, 256],
    never_together=[("alibi_slopes", "sinks")],
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
    sliding_window=None,
    logits_soft_cap=None,
    alibi_slopes=None,  # [query_heads] float32
    sinks=None,  # [query_heads]
):
    """Return attention of each new token over its sequence in the paged cache."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    tokens = int(query_start_loc[-1])
    if not tokens:
        return out
    columns = torch.arange(block_table.shape[1], device=query.device)
    owned = columns < -(-seq_lens // key_cache.shape[1])[:, None]
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
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        block_table=torch.where(owned, block_table, 0),
        softcap=logits_soft_cap or 0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.contiguous(),
        sinks=None if sinks is None else sinks.contiguous(),
    )
    return out
