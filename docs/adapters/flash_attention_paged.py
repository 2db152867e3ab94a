"""Adapter for FlashAttention-2 with a paged cache.

Written from the documented signature of `flash_attn_varlen_func`; it needs a GPU and has not been
run here. FlashAttention 2 takes pages of 256 slots and multiples of that, and aligns a causal mask
to the end of the keys, as pagetwin does.
"""

import torch
from pagetwin.conformance import flash_attention_like

try:
    from flash_attn import flash_attn_varlen_func
except ImportError as error:
    raise ImportError(
        "this adapter needs FlashAttention 2 and a GPU: pip install flash-attn"
    ) from error

SUPPORT = flash_attention_like(
    # its caches and queries are packed below
    kv_layouts=None,
    strides={},
    alignment=None,
    block_sizes=[256, 512],
    head_sizes=[32, 64, 96, 128, 160, 192, 256],
    options={
        "scale": None,
        "out": None,
        "lse": None,
        "causal": "bool",  # one flag for all requests
        "sliding_window": None,
        "logits_soft_cap": None,
        "alibi_slopes": None,
    },
    # without a causal mask its bias falls to both sides, -|distance|
    never_together=[("causal", "alibi_slopes")],
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
    sliding_window=None,
    logits_soft_cap=None,
    alibi_slopes=None,  # [query_heads] float32
    causal=True,
):
    """Return attention of each new token over its sequence in the paged cache."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    tokens = int(query_start_loc[-1])
    if not tokens or not int(seq_lens.sum()):
        return out
    # step: compute where each sequence's keys would start if they were concatenated
    key_start_loc = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int()
    # its prefetch reads entries past the end of a row: each must be a valid block id
    columns = torch.arange(block_table.shape[1], device=query.device)
    owned = columns < -(-seq_lens // key_cache.shape[1])[:, None]
    left = -1 if sliding_window is None else sliding_window - 1

    # step: attend
    result, natural, _ = flash_attn_varlen_func(
        query[:tokens].contiguous(),
        key_cache.contiguous(),
        value_cache.contiguous(),
        query_start_loc,
        key_start_loc,
        max_query_len,
        max_seq_len,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, left),  # a causal mask has no right side
        softcap=logits_soft_cap or 0.0,
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,
        block_table=torch.where(owned, block_table, 0),
    )
    out[:tokens] = result
    if lse is not None:
        # [query_heads, tokens]; without keys its log-sum-exp is +inf
        lse[:, :tokens] = natural.masked_fill(natural == torch.inf, -torch.inf)
    return out
