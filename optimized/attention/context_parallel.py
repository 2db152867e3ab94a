"""Decode context parallelism: one sequence's keys distributed over ranks.

The tokens of a rank are counted by a division: whole rounds first, and the remainder of a sequence
goes to the first ranks. Everything runs on the device of the lengths. Each new token becomes a
request of its own, and finds its sequence by bisection, so the host does not wait.
"""

from dataclasses import replace

import torch

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    Query,
    RankTokenCounts,
    StartLoc,
    TokenCounts,
    ValueCache,
    WideTokenCounts,
)
from ...reference.attention.context_parallel import get_dcp_ranks as get_dcp_ranks
from ...validation import values_checked
from ...validation.cascade import check_dcp_attention
from ...validation.step_shapes import check_rank_lens, check_ranks
from ..runtime.operators import operator
from .paged import paged_attention


@typed
def get_dcp_local_seq_lens(
    seq_lens: TokenCounts | WideTokenCounts,
    dcp_world_size: int = 1,
    dcp_rank: int | None = None,
    dcp_kv_cache_interleave_size: int = 1,
) -> RankTokenCounts | TokenCounts:
    """Return how many tokens of each sequence are stored on one rank, or on each rank."""
    check_ranks(dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    if values_checked(seq_lens):
        check_rank_lens(seq_lens)
    # step: count the positions that each rank stores
    interleave = dcp_kv_cache_interleave_size
    tokens_per_round = interleave * dcp_world_size
    rounds = seq_lens // tokens_per_round
    ranks = torch.arange(dcp_world_size, dtype=torch.int32, device=seq_lens.device)
    rest = (seq_lens % tokens_per_round)[:, None] - ranks * interleave
    counts = rounds[:, None] * interleave + rest.clamp(0, interleave)
    # step: select the requested rank
    chosen = counts if dcp_rank is None else counts[:, dcp_rank]
    return chosen.to(torch.int32)


@operator(out=["out", "lse"])
def dcp_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    dcp_world_size: int,
    dcp_rank: int,
    dcp_kv_cache_interleave_size: int = 1,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Output:
    """Return one rank's partial attention of each new token, over the keys that the rank keeps.

    Raises:
        NotImplementedError: what `paged_attention` of this package does not compute.
    """
    of_rank = (dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    max_local_len = check_dcp_attention(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
        max_query_len, max_seq_len, *of_rank, out, lse, options, contents=values_checked(query),
        scale=scale,
    )  # fmt: skip
    # step: find each token's position
    reqs = len(block_table)
    tokens = query.shape[0] if reqs else 0
    token = torch.arange(tokens + 1, dtype=torch.int32, device=query.device)
    starts = query_start_loc.contiguous()
    # rows past the last request become requests without tokens
    token_starts = torch.minimum(token, starts[-1])
    token = token[:tokens]
    req = torch.searchsorted(starts[1:], token, right=True).clamp(max=reqs - 1)
    position = seq_lens[req] - starts[req + 1] + token
    # step: count the rank's keys up to that position
    is_token = token_starts[1:] > token
    local_lens = get_dcp_local_seq_lens((position + 1) * is_token, *of_rank)
    # step: attend to these keys, with one request per token
    return paged_attention(
        query,
        key_cache,
        value_cache,
        block_table[req],
        token_starts,
        local_lens,
        max_query_len=1,
        max_seq_len=max_local_len,
        scale=scale,
        out=out,
        lse=lse,
        compute_dtype=compute_dtype,
        options=replace(
            options,
            # each token is a request of its own length, so no later key is visible
            causal=False,
            # the sink counts once, not once per rank
            sinks=options.sinks if dcp_rank == 0 else None,
        ),
    )
