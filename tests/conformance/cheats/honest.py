"""A correct decode in plain torch, from which the kinds of `kinds.py` are made."""

import torch
from pagetwin.conformance import Support

SUPPORT = Support(
    operations=["paged_attention"],
    dtypes=["float32"],
    cache_dtypes=["float32"],
    query_lens=range(2),
    options=["scale", "out", "lse"],
    rejects=[],
)


def attend(
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
    lse=None,  # [query_heads, tokens]
):
    """Return attention of one new token of each request over its sequence."""
    size = value_cache.shape[-1]
    out = query.new_empty(*query.shape[:2], size) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    group = query.shape[1] // key_cache.shape[2]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        token = starts[req]
        if token == starts[req + 1] or not seq_len:
            continue
        blocks = block_table[req, : -(-seq_len // key_cache.shape[1])].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(group, 1).double()
            for cache in (key_cache, value_cache)
        )  # [seq_len, query_heads, head_size]
        scores = (key * query[token].double()).sum(-1) * scale  # [seq_len, query_heads]
        weights = scores.softmax(0)
        out[token] = (weights[..., None] * value).sum(0).to(out.dtype)
        if lse is not None:
            lse[:, token] = scores.logsumexp(0).float()
    return out
