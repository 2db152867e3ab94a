"""Adapter for FlashInfer's paged attention.

The wrapper is planned for each call, which is slow and correct. FlashInfer takes the block ids of
all requests in one list instead of a table, and its log-sum-exp has base 2. It compiles its kernels
for each dtype, head size, window and soft cap, with nvcc, for a minute or more. So the declaration
is narrower than what FlashInfer takes: bfloat16 and head size 128. The variable
PAGETWIN_FLASHINFER_BACKEND chooses among "auto", "fa2" and "fa3".
"""

import math
import os

import torch
from pagetwin.conformance import flashinfer_like

try:
    import flashinfer
except ImportError as error:
    raise ImportError(
        "this adapter needs FlashInfer and a GPU: pip install flashinfer-python"
    ) from error

# its caches and queries are packed below; one causal flag for all requests, windows are causal
SUPPORT = flashinfer_like(
    dtypes=["bfloat16"],
    cache_dtypes=["bfloat16"],
    head_sizes=[128],
    strides={},
    same_strides=(),
    alignment=None,
)
BACKEND = os.environ.get("PAGETWIN_FLASHINFER_BACKEND", "auto")


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
    causal=True,
):
    """Return attention of each new token over its sequence in the paged cache."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    # step: leave out requests without queries or keys
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    rows = [
        req for req in range(len(lens)) if starts[req] < starts[req + 1] and lens[req]
    ]
    if not rows:
        return out
    block_size = key_cache.shape[1]
    counts = [-(-lens[req] // block_size) for req in rows]
    queries = [starts[req + 1] - starts[req] for req in rows]
    tokens = torch.cat(
        [
            torch.arange(starts[req], starts[req + 1], device=query.device)
            for req in rows
        ]
    )

    # step: plan, with the rows of the table concatenated
    def running(numbers):
        total = torch.tensor([0, *numbers], device=query.device).cumsum(0)
        return total.int()

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=query.device),
        "NHD",
        backend=BACKEND,
    )
    wrapper.plan(
        running(queries),
        running(counts),
        torch.cat(
            [block_table[req, :count] for req, count in zip(rows, counts, strict=True)]
        ),
        torch.tensor(
            [(lens[req] - 1) % block_size + 1 for req in rows],
            dtype=torch.int32,
            device=query.device,
        ),
        query.shape[1],
        key_cache.shape[2],
        query.shape[2],
        block_size,
        causal=causal,
        sm_scale=scale,
        # keys before the position of the query
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=logits_soft_cap,
        q_data_type=query.dtype,
        kv_data_type=key_cache.dtype,
    )

    # step: attend
    result, base_2 = wrapper.run(
        query[tokens].contiguous(),
        (key_cache.contiguous(), value_cache.contiguous()),
        return_lse=True,
    )
    out[tokens] = result
    if lse is not None:
        # [tokens, query_heads], base 2
        lse[:, tokens] = base_2.T * math.log(2)
    return out
