"""Adapter for a decode that uses only torch's own attention.

Each request has one new token. Its keys are gathered through its row of the block table, and
passed to torch's scaled_dot_product_attention.
"""

import torch
from pagetwin.conformance import Support
from pagetwin.contract.default_modes import default_modes

SUPPORT = Support(
    operations=["paged_attention"],
    dtypes=["float32", "float16"],
    cache_dtypes=["float32", "float16"],
    query_lens=range(2),
    options=["scale", "out"],
    rejects=[],
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
):
    """Return attention of one new token of each request over its sequence."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    group = query.shape[1] // key_cache.shape[2]
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        if starts[req] == starts[req + 1]:
            continue
        blocks = block_table[req, : -(-seq_len // key_cache.shape[1])].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )  # [seq_len, query_heads, head_size]
        # a result does not depend on autocast or on set_float32_matmul_precision, and torch's
        # attention would
        with default_modes():
            out[starts[req]] = torch.nn.functional.scaled_dot_product_attention(
                query[starts[req], :, None],  # [query_heads, 1, head_size]
                key.transpose(0, 1),
                value.transpose(0, 1),
                scale=scale,
            )[:, 0]
    return out
