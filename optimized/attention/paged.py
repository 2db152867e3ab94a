"""What does each new token see of its sequence?

Nothing is gathered: the kernel of `_attend.py` follows the block table while it attends. What it
does, and how a batch is cut into programs, stands there.
"""

import torch

from ...contract.shapes import (
    BlockTable,
    CausalFlags,
    KeyCache,
    LogSumExp,
    Output,
    PerHead,
    PositionBias,
    Query,
    Scale,
    StartLoc,
    TokenCounts,
    TokenRanges,
    TreeMask,
    ValueCache,
)
from ...validation import check_paged_attention
from ..launch.dispatch import attend, check_compute_dtype, choose_options
from ..launch.operators import operator


@operator(out=["out", "lse"])
def paged_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: PerHead | None = None,
    sinks: PerHead | None = None,
    causal: bool | CausalFlags = True,
    attention_chunk_size: int | None = None,
    tree_mask: TreeMask | None = None,
    query_ranges: TokenRanges | None = None,
    position_bias: PositionBias | None = None,
    k_scale: Scale | float | None = None,
    v_scale: Scale | float | None = None,
    out_scale: Scale | float | None = None,
    batch_invariant: bool = False,
) -> Output:
    """Return attention of each new token over its sequence in the paged cache.

    Raises:
        NotImplementedError: another `compute_dtype` than float32, a head of more than 1,024
            elements, or a float64 cache; the reference takes them.
    """
    check_compute_dtype(compute_dtype)
    options = choose_options(
        causal=causal,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
        tree_mask=tree_mask,
        query_ranges=query_ranges,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        position_bias=position_bias,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        out_scale=out_scale,
        batch_invariant=batch_invariant,
    )
    tensors = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens)
    bounds = (max_query_len, max_seq_len)

    def check(contents: bool) -> None:
        check_paged_attention(*tensors, *bounds, out, lse, options, contents=contents)

    return attend(*tensors, *bounds, scale, out, lse, options, check)
