"""What does a token see that is not cached?

The kernel of `_attend.py` again, which finds key p of a request p rows behind its first one instead
of through a block table.
"""

import torch

from ...contract.shapes import (
    CausalFlags,
    LogSumExp,
    Output,
    PerHead,
    PositionBias,
    Query,
    RaggedKey,
    RaggedValue,
    Scale,
    StartLoc,
    TokenRanges,
)
from ...validation import check_encoder_attention
from ..launch.dispatch import attend, check_compute_dtype, choose_options
from ..launch.operators import operator


@operator(out=["out", "lse"])
def encoder_attention(
    query: Query,
    key: RaggedKey,
    value: RaggedValue,
    query_start_loc: StartLoc,
    key_start_loc: StartLoc,
    max_query_len: int,
    max_key_len: int,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: PerHead | None = None,
    sinks: PerHead | None = None,
    causal: bool | CausalFlags = False,
    attention_chunk_size: int | None = None,
    query_ranges: TokenRanges | None = None,
    position_bias: PositionBias | None = None,
    out_scale: Scale | float | None = None,
    batch_invariant: bool = False,
) -> Output:
    """Return attention of each request's queries over its keys, which lie one after another.

    Raises:
        NotImplementedError: another `compute_dtype` than float32, a head of more than 1,024
            elements, or float64 inputs; the reference takes them.
    """
    check_compute_dtype(compute_dtype)
    options = choose_options(
        causal=causal,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
        query_ranges=query_ranges,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        position_bias=position_bias,
        sinks=sinks,
        out_scale=out_scale,
        batch_invariant=batch_invariant,
    )
    starts = (query_start_loc, key_start_loc)
    bounds = (max_query_len, max_key_len)

    def check(contents: bool) -> None:
        check_encoder_attention(
            query, key, value, *starts, *bounds, out, lse, options, contents=contents
        )

    return attend(
        query, key, value, None, *starts, *bounds, scale, out, lse, options, check
    )
