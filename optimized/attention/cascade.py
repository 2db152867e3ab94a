"""Cascade attention: a prefix that all requests share is read once.

Two launches of the portable kernels compute partial results over the prefix and over the rest of
each sequence, and a third one merges them. Lengths are reduced on the device, so the host does not
wait, and a CUDA graph can capture the call. The prefix is read through row 0 of the block table.
The entries of the other rows for it are never read, and are not validated to be equal.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...bookkeeping.attention.cascade import (
    use_cascade_attention as use_cascade_attention,
)
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    Query,
    StartLoc,
    TokenCounts,
    ValueCache,
)
from ...validation import values_checked
from ...validation.cascade import check_cascade
from ..launch.operators import operator
from ..launch.tuning import DECODE_ROWS, PROGRAMS, count_processors
from .merge_states import merge_attn_states
from .paged import paged_attention


@operator(out=["out", "lse"])
def cascade_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    common_prefix_len: int,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return attention of each new token over its sequence, the shared prefix read once.

    Raises:
        NotImplementedError: what `paged_attention` of this package does not compute.
    """
    options = options.with_causal(True)
    batch = (block_table, query_start_loc, seq_lens, max_query_len, max_seq_len)
    check_cascade(
        query, key_cache, value_cache, *batch, common_prefix_len, out, lse, options,
        contents=values_checked(),
    )  # fmt: skip
    attend = partial(
        paged_attention, query, key_cache, value_cache, scale=scale, compute_dtype=compute_dtype
    )  # fmt: skip
    if not common_prefix_len or not len(block_table):
        return attend(*batch, out=out, lse=lse, options=options)
    tokens, query_heads, _ = query.shape
    if out is None:
        out = query.new_empty(tokens, query_heads, value_cache.shape[-1])
    # partial results have the dtype of the arithmetic, so the result is rounded once
    partials = out.new_empty(2, *out.shape, dtype=compute_dtype)
    lses = out.new_empty(2, query_heads, tokens, dtype=torch.float32)
    prefix_blocks = common_prefix_len // key_cache.shape[1]
    # step: attend to the shared prefix, all queries as one request
    chunk = _queries_per_chunk(query, key_cache)
    starts = _chunk_starts(query_start_loc, tokens, chunk)
    chunks = len(starts) - 1
    prefix = block_table[:1, :prefix_blocks].expand(chunks, -1)
    prefix_lens = seq_lens.new_full((chunks,), common_prefix_len)
    attend(
        prefix, starts, prefix_lens, chunk, max_seq_len=common_prefix_len, out=partials[0],
        lse=lses[0], options=replace(options, causal=False, tree_mask=None, sinks=None),
    )  # fmt: skip
    # step: attend to the rest of each sequence
    rest = block_table[:, prefix_blocks:]
    # a request without new tokens may be shorter than the prefix
    rest_lens = (seq_lens - common_prefix_len).clamp(min=0)
    max_rest_len = max(max_seq_len - common_prefix_len, 0)
    attend(
        rest, query_start_loc, rest_lens, max_query_len, max_seq_len=max_rest_len,
        out=partials[1], lse=lses[1], options=options,
    )  # fmt: skip
    # step: merge both results by their log-sum-exp
    return merge_attn_states(
        partials[0], lses[0], partials[1], lses[1], output=out, output_lse=lse
    )


def _chunk_starts(query_start_loc: Tensor, tokens: int, chunk: int) -> Tensor:
    """Return [chunks + 1] the start of each chunk of all queries.

    Rows past the last request belong to no chunk.
    """
    chunks = -(-tokens // chunk)
    starts = torch.arange(chunks + 1, dtype=torch.int32, device=query_start_loc.device)
    return torch.minimum(starts * chunk, query_start_loc[-1])


def _queries_per_chunk(query: Tensor, key_cache: Tensor) -> int:
    """Return the number of queries per request of the launch over the prefix.

    If all queries were one request, each program would read the whole prefix, and few queries
    would leave most of the chip idle. Chunks of the size of a decode are split along the keys
    instead, and what several chunks read comes from the L2 cache. Many queries fill the chip by
    themselves, and stay one request.
    """
    tokens, query_heads, _ = query.shape
    kv_heads = key_cache.shape[2]
    group_size = query_heads // kv_heads
    chunk = max(1, DECODE_ROWS // group_size)
    programs = PROGRAMS * count_processors(query.device)
    fills_chip = -(-tokens // chunk) * kv_heads >= programs
    return max(tokens, 1) if fills_chip else chunk
