"""Encoder attention: tokens attend to each other without a cache.

The kernel of `_attend.py` again, which finds key p of a request p rows behind its first one instead
of through a block table.
"""

import torch

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.shapes import (
    LogSumExp,
    Output,
    Query,
    RaggedKey,
    RaggedValue,
    StartLoc,
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
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return attention of each request's queries over its keys, which lie one after another.

    Raises:
        NotImplementedError: another `compute_dtype` than float32, a head of more than 1,024
            elements, or float64 inputs; the reference takes them.
    """
    check_compute_dtype(compute_dtype)
    options = choose_options(options, causal=False)
    starts = (query_start_loc, key_start_loc)
    bounds = (max_query_len, max_key_len)

    def check(contents: bool) -> None:
        check_encoder_attention(
            query, key, value, *starts, *bounds, out, lse, options, contents=contents
        )

    return attend(
        query, key, value, None, *starts, *bounds, scale, out, lse, options, check
    )
