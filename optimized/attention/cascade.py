"""Cascade attention: a prefix that all requests share is read once.

Two launches compute it. In the first one the queries of all requests are the rows of one sequence,
the prefix, which is split over the chip. The second one attends to the rest of each sequence, and
merges each row with its partial result over the prefix. Lengths are reduced on the device, so the
host does not wait, and a CUDA graph can capture the call. The prefix is read through row 0 of the
block table. The entries of the other rows for it are never read, and are not validated to be equal.
"""

import torch

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
from ...reference.attention.cascade import (
    use_cascade_attention as use_cascade_attention,
)
from ...validation import values_checked
from ..dispatch.cascade import PIPELINE
from ..dispatch.checks import check_cascade_call
from ..dispatch.dispatch import choose_options, reject_compute_dtype
from ..dispatch.pipeline import attend
from ..runtime.attention_call import AttentionCall
from ..runtime.operators import operator
from .paged import paged_attention


@operator(out=["out", "lse"], is_repeated=True)
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
    if compute_dtype != torch.float32:
        reject_compute_dtype(compute_dtype)
    options = choose_options(options, causal=True)
    call = AttentionCall(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
        max_query_len, max_seq_len, scale, out, lse, options,
    )  # fmt: skip
    if not common_prefix_len or not len(block_table):
        check_cascade_call(call, common_prefix_len, values_checked(query))
        return paged_attention(
            query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
            max_query_len, max_seq_len, scale=scale, out=out, lse=lse, options=options,
        )  # fmt: skip
    return attend(PIPELINE, call, check_cascade_call, common_prefix_len)
