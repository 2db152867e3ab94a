"""Cascade attention: a prefix that all requests share is read once.

The twin's own kernels make both parts and join them. Lengths are shortened where they lie, so the
host waits for nothing and a CUDA graph may hold it all. That the rows share the prefix is believed:
their entries for it are never read, except those of row 0.
"""

from dataclasses import replace

import torch
from torch import Tensor

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
        NotImplementedError: what the twin's `paged_attention` does not take either.
    """
    options = options.with_causal(True)
    check_cascade(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        common_prefix_len,
        out,
        lse,
        options,
        contents=values_checked(),
    )
    if not common_prefix_len or not len(block_table):
        return paged_attention(
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            max_query_len,
            max_seq_len,
            scale=scale,
            out=out,
            lse=lse,
            compute_dtype=compute_dtype,
            options=options,
        )
    tokens, query_heads, _ = query.shape
    if out is None:
        out = query.new_empty(tokens, query_heads, value_cache.shape[-1])
    # the parts keep the dtype of the arithmetic, so that the result is rounded once
    parts = out.new_empty(2, *out.shape, dtype=compute_dtype)
    lses = out.new_empty(2, query_heads, tokens, dtype=torch.float32)
    prefix_blocks = common_prefix_len // key_cache.shape[1]
    # step: attend to the shared prefix, all queries as one request
    per_piece = _queries_per_piece(query, key_cache)
    pieces = -(-tokens // per_piece)
    starts = torch.arange(pieces + 1, dtype=torch.int32, device=query.device)
    starts *= per_piece
    paged_attention(
        query,
        key_cache,
        value_cache,
        block_table[:1, :prefix_blocks].expand(pieces, -1),
        # rows behind the last request stay nobody's
        torch.minimum(starts, query_start_loc[-1]),
        seq_lens.new_full((pieces,), common_prefix_len),
        max_query_len=per_piece,
        max_seq_len=common_prefix_len,
        scale=scale,
        out=parts[0],
        lse=lses[0],
        compute_dtype=compute_dtype,
        options=replace(options, causal=False, tree_mask=None, sinks=None),
    )
    # step: attend to the rest of each sequence
    paged_attention(
        query,
        key_cache,
        value_cache,
        block_table[:, prefix_blocks:],
        query_start_loc,
        # a request without new tokens may be shorter than the prefix
        (seq_lens - common_prefix_len).clamp(min=0),
        max_query_len,
        max_seq_len=max(max_seq_len - common_prefix_len, 0),
        scale=scale,
        out=parts[1],
        lse=lses[1],
        compute_dtype=compute_dtype,
        options=options,
    )
    # step: join both by their log-sum-exp
    return merge_attn_states(
        parts[0], lses[0], parts[1], lses[1], output=out, output_lse=lse
    )


def _queries_per_piece(query: Tensor, key_cache: Tensor) -> int:
    """Return into pieces of how many queries the pass over the prefix is cut.

    Few queries leave most of the chip idle if each program reads the whole prefix. In pieces as
    small as decodes they are split along its keys, and what several pieces read comes from the
    L2 cache. Many queries fill the chip by themselves, and stay one request.
    """
    tokens, query_heads, _ = query.shape
    kv_heads = key_cache.shape[2]
    group_size = query_heads // kv_heads
    per_piece = max(1, DECODE_ROWS // group_size)
    wanted = PROGRAMS * count_processors(query.device)
    fills_chip = -(-tokens // per_piece) * kv_heads >= wanted
    return max(tokens, 1) if fills_chip else per_piece
