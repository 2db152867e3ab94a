"""Paged attention: new tokens attend to keys and values in cache blocks.

The kernels in `kernels/` follow the block table while they attend; nothing is gathered first.
`launch/dispatch.py` chooses between decode, split-KV and prefill kernels.
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
from ...validation import check_paged_attention
from ..launch.attention_call import AttentionCall
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
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return attention of each new token over its sequence in the paged cache.

    Raises:
        NotImplementedError: `compute_dtype` is not float32, a head has more than 1,024 elements,
            or there is a float64 cache. The reference supports them.
    """
    check_compute_dtype(compute_dtype)
    options = choose_options(options, causal=True)
    call = AttentionCall(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
        max_query_len, max_seq_len, scale, out, lse, options,
    )  # fmt: skip
    return attend(call, _check)


def _check(call: AttentionCall, contents: bool) -> None:
    """Raise if a call is wrong; validate contents too if `contents` is True."""
    (
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len, _,
        out, lse, options,
    ) = call  # fmt: skip
    assert block_table is not None
    check_paged_attention(
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len,
        out, lse, options, contents=contents,
    )  # fmt: skip
