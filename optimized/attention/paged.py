"""Paged attention: new tokens attend to keys and values in cache blocks.

The kernels in `kernels/` follow the block table while they attend; nothing is gathered first. The
loop over the keys is in `kernels/portable/attention_tile.py`.
`dispatch/choice.py` chooses the kernel families: decode, append or prefill, each portable or for a
chip. Batch-invariant calls have kernels of their own.
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
from ..dispatch.checks import check_paged_call
from ..dispatch.dispatch import PIPELINE, choose_options, reject_compute_dtype
from ..dispatch.pipeline import attend
from ..runtime.attention_call import AttentionCall
from ..runtime.operators import operator


@operator(out=["out", "lse"], is_repeated=True)
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
    if compute_dtype != torch.float32:
        reject_compute_dtype(compute_dtype)
    if block_table is None:
        # a call without one has ragged keys, and could be known as such
        raise TypeError("block_table = None: expected a torch.Tensor")
    options = choose_options(options, causal=True)
    call = AttentionCall(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
        max_query_len, max_seq_len, scale, out, lse, options,
    )  # fmt: skip
    return attend(PIPELINE, call, check_paged_call)
