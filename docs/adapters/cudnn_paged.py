"""Adapter for cuDNN's attention over a paged cache, through FlashInfer's functions.

cuDNN builds a graph for each shape, and aligns the causal mask and the window with the last key of
each request. What lies past the end of a sequence is multiplied by weights of 0, and 0 * NaN = NaN:
so the caches are copied, with zeros in the slots of no request. Sinks are not declared, since it
takes none for one new token. It needs flashinfer-python and nvidia-cudnn-frontend.
"""

import math
from dataclasses import replace

import torch
from flashinfer_paged import SUPPORT as WRAPPERS
from flashinfer_paged import flashinfer, listed

try:
    import cudnn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "this adapter needs cuDNN and a GPU: pip install nvidia-cudnn-frontend"
    ) from error

SUPPORT = replace(
    WRAPPERS,
    dtypes=["float16", "bfloat16"],
    cache_dtypes=["float16", "bfloat16"],
    head_sizes=[64, 128],
    block_sizes=[16, 32, 64],
    options={
        "scale": None,
        "out": None,
        "lse": None,
        "causal": "bool",
        "sliding_window": None,
    },
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
):
    """Return attention of each new token over its sequence in the paged cache."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    block_size = key_cache.shape[1]
    batch = listed(block_table, query_start_loc, seq_lens, block_size)
    if batch is None:
        return out
    table = batch.table()
    queries = batch.starts.diff()

    # step: leave zeros in slots of no request
    slots = torch.arange(table.shape[1] * block_size, device=query.device)
    req, index = (slots < batch.lens[:, None]).nonzero().T
    own = table[req, index // block_size].long(), index % block_size
    keys, values = (
        torch.zeros(cache.shape, dtype=cache.dtype, device=cache.device)
        for cache in (key_cache, value_cache)
    )
    keys[own], values[own] = key_cache[own], value_cache[own]

    # step: attend
    result, base_2 = flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache(
        query[batch.tokens].contiguous(),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        query.shape[2] ** -0.5 if scale is None else scale,
        torch.empty(128 << 20, dtype=torch.uint8, device=query.device),
        max_token_per_sequence=int(queries.max()),
        max_sequence_kv=table.shape[1] * block_size,
        actual_seq_lens_q=queries.view(-1, 1, 1, 1),
        actual_seq_lens_kv=batch.lens.view(-1, 1, 1, 1),
        block_tables=table,
        causal=causal,
        return_lse=True,
        batch_offsets_q=batch.starts,
        batch_offsets_o=batch.starts,
        batch_offsets_units="tokens",
        window_left=None if sliding_window is None else sliding_window - 1,
    )
    out[batch.tokens] = result
    if lse is not None:
        lse[:, batch.tokens] = base_2.T * math.log(2)  # [tokens, query_heads]
    return out
