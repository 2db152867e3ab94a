"""Adapter for FlashInfer's decode wrapper, on tensor cores: one new token of each request.

Like `flashinfer_paged`, it is planned for each call and declares bfloat16 and head size 128.
"""

import math
from dataclasses import replace

import torch
from flashinfer_paged import SUPPORT as PREFILL
from flashinfer_paged import flashinfer, listed

SUPPORT = replace(
    PREFILL,
    query_lens=range(2),
    options={
        name: values for name, values in PREFILL.options.items() if name != "causal"
    },
    never_together=(),
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
    sliding_window=None,
    logits_soft_cap=None,
):
    """Return attention of one new token of each request over its sequence."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    block_size = key_cache.shape[1]
    batch = listed(block_table, query_start_loc, seq_lens, block_size)
    if batch is None:
        return out
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=query.device),
        "NHD",
        use_tensor_cores=True,
    )
    wrapper.plan(
        batch.block_starts,
        batch.blocks,
        batch.last,
        query.shape[1],
        key_cache.shape[2],
        query.shape[2],
        block_size,
        sm_scale=scale,
        # keys before the position of the query
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=logits_soft_cap,
        q_data_type=query.dtype,
        kv_data_type=key_cache.dtype,
    )
    result, base_2 = wrapper.run(
        query[batch.tokens].contiguous(),
        (key_cache.contiguous(), value_cache.contiguous()),
        return_lse=True,
    )
    out[batch.tokens] = result
    if lse is not None:
        # [tokens, query_heads], base 2
        lse[:, batch.tokens] = base_2.T * math.log(2)
    return out
