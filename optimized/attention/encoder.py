"""Encoder attention: tokens attend to each other without a cache.

The kernels of paged attention without a block table: key p of a request is p rows after its first
one.
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
from ..dispatch.checks import check_encoder_call
from ..dispatch.dispatch import PIPELINE, choose_options, reject_compute_dtype
from ..dispatch.pipeline import attend
from ..runtime.attention_call import AttentionCall
from ..runtime.operators import operator


@operator(out=["out", "lse"], is_repeated=True)
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
        NotImplementedError: `compute_dtype` is not float32, a head has more than 1,024 elements,
            or inputs are float64. The reference supports them.
    """
    if compute_dtype != torch.float32:
        reject_compute_dtype(compute_dtype)
    options = choose_options(options, causal=False)
    call = AttentionCall(
        query, key, value, None, query_start_loc, key_start_loc, max_query_len,
        max_key_len, scale, out, lse, options,
    )  # fmt: skip
    return attend(PIPELINE, call, check_encoder_call)
