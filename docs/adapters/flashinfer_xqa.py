"""Adapter for XQA, TensorRT-LLM's decode kernel, as FlashInfer has it.

One new token of each request. It compiles a kernel for each dtype, head size, block size, number of
query heads per KV head and window or none, with nvcc, for a minute or more. So the declaration has
one of each: bfloat16, heads of 128, blocks of 16, and four query heads per KV head.
"""

import torch
from flashinfer_paged import flashinfer, listed
from pagetwin.conformance import Support

SUPPORT = Support(
    operations=["paged_attention"],
    devices=["sm_90"],
    dtypes=["bfloat16"],
    cache_dtypes=["bfloat16"],
    tensor_dtypes={"sinks": ["float32"]},
    head_sizes=[128],
    group_sizes=[4],
    block_sizes=[16],
    query_lens=range(2),
    options=["scale", "out", "sliding_window", "sinks"],
    rejects=[],
)


def paged_attention(
    query,  # [tokens, query_heads, 128]
    key_cache,  # [num_blocks, 16, kv_heads, 128]
    value_cache,
    block_table,  # [reqs, max_blocks]
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,
    sliding_window=None,
    sinks=None,  # [query_heads] float32
):
    """Return attention of one new token of each request over its sequence."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    block_size, kv_heads, head_size = key_cache.shape[1:]
    batch = listed(block_table, query_start_loc, seq_lens, block_size)
    if batch is None:
        return out

    # step: attend
    queries = query[batch.tokens].contiguous()
    result = torch.empty_like(queries)
    device = query.device
    flashinfer.xqa(
        queries[:, None],  # one beam
        key_cache.contiguous(),
        value_cache.contiguous(),
        batch.table(),
        batch.lens[:, None].to(torch.uint32),
        result[:, None],
        torch.zeros(128 << 20, dtype=torch.uint8, device=device),
        torch.zeros(1 << 20, dtype=torch.uint8, device=device).view(torch.uint32),
        kv_heads,
        block_size,
        sinks=None if sinks is None else sinks.view(kv_heads, -1).contiguous(),
        # it multiplies the default scale
        q_scale=1.0 if scale is None else scale * head_size**0.5,
        sliding_win_size=sliding_window or 0,
    )
    out[batch.tokens] = result
    return out
