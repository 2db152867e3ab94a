"""Adapter for FlashInfer's paged attention.

The wrapper is planned for each call, which is slow and correct. FlashInfer takes the block ids of
all requests in one list instead of a table, and its log-sum-exp has base 2. It compiles its kernels
for each dtype, head size, window and soft cap, with nvcc, for a minute or more. So the declaration
is narrower than what FlashInfer takes: bfloat16 and head size 128. The variable
PAGETWIN_FLASHINFER_BACKEND is "fa2", the default, or "fa3". PAGETWIN_FLASHINFER_LEFT_OUT names
options that are not declared, as in "logits_soft_cap sliding_window": each has kernels of its own.
"""

import math
import os
from dataclasses import replace
from typing import NamedTuple

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
BACKEND = os.environ.get("PAGETWIN_FLASHINFER_BACKEND", "fa2")
LEFT_OUT = os.environ.get("PAGETWIN_FLASHINFER_LEFT_OUT", "").split()
if LEFT_OUT:
    SUPPORT = replace(
        SUPPORT,
        options={
            name: values
            for name, values in SUPPORT.options.items()
            if name not in LEFT_OUT
        },
        never_together=() if "sliding_window" in LEFT_OUT else SUPPORT.never_together,
    )


class Listed(NamedTuple):
    """The requests of a batch that have new tokens and keys, with their blocks in one list."""

    tokens: torch.Tensor  # [their tokens] rows of the query
    starts: torch.Tensor  # [reqs + 1] int32 first token
    lens: torch.Tensor  # [reqs] int32 keys
    block_starts: torch.Tensor  # [reqs + 1] int32 first block of the list
    blocks: torch.Tensor  # [blocks] int32
    last: torch.Tensor  # [reqs] int32 keys in the last block

    def table(self):
        """Return a table of the requests' own blocks, with 0 after the last one."""
        rows = self.blocks.split(self.block_starts.diff().tolist())
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).int()


def listed(block_table, query_start_loc, seq_lens, block_size):
    """Return the batch as FlashInfer takes it, or None if there is nothing to compute."""
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    rows = [
        req for req in range(len(lens)) if starts[req] < starts[req + 1] and lens[req]
    ]
    if not rows:
        return None

    def ints(numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=block_table.device)

    counts = [-(-lens[req] // block_size) for req in rows]
    tokens = [
        torch.arange(starts[req], starts[req + 1], device=block_table.device)
        for req in rows
    ]
    return Listed(
        torch.cat(tokens),
        ints([0, *(len(own) for own in tokens)]).cumsum(0).int(),
        ints([lens[req] for req in rows]),
        ints([0, *counts]).cumsum(0).int(),
        torch.cat(
            [block_table[req, :count] for req, count in zip(rows, counts, strict=True)]
        ),
        ints([(lens[req] - 1) % block_size + 1 for req in rows]),
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
    causal=True,
):
    """Return attention of each new token over its sequence in the paged cache."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    batch = listed(block_table, query_start_loc, seq_lens, key_cache.shape[1])
    if batch is None:
        return out
    block_size = key_cache.shape[1]

    # step: plan
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=query.device),
        "NHD",
        backend=BACKEND,
    )
    wrapper.plan(
        batch.starts,
        batch.block_starts,
        batch.blocks,
        batch.last,
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
        query[batch.tokens].contiguous(),
        (key_cache.contiguous(), value_cache.contiguous()),
        return_lse=True,
    )
    out[batch.tokens] = result
    if lse is not None:
        # [tokens, query_heads], base 2
        lse[:, batch.tokens] = base_2.T * math.log(2)
    return out
