"""Paged attention: new tokens attend to keys and values in cache blocks.

Nothing is gathered: the kernel of `_attend.py` follows the block table while it attends. What it
does, and how a batch is cut into programs, stands there.
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
        NotImplementedError: another `compute_dtype` than float32, a head of more than 1,024
            elements, or a float64 cache; the reference takes them.
    """
    check_compute_dtype(compute_dtype)
    options = choose_options(options, causal=True)
    tensors = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens)
    bounds = (max_query_len, max_seq_len)

    def check(contents: bool) -> None:
        check_paged_attention(*tensors, *bounds, out, lse, options, contents=contents)

    return attend(*tensors, *bounds, scale, out, lse, options, check)
