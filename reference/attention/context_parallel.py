"""Decode context parallelism: one sequence's keys distributed over ranks.

Decode context parallelism distributes one sequence's keys and values over several devices (ranks),
so that each reads only its share. Positions are dealt out in turn: `interleave_size` of them to
rank 0, as many to rank 1, and so on. A rank stores its share without gaps. So the keys that a new
token attends to on a rank are the first ones of that share: those of the positions up to the
token's own. Each rank attends to these, and the partial results are combined by their log-sum-exp.
"""

from dataclasses import replace

import torch

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.kinds import HOST
from ...contract.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    Positions,
    Query,
    RankTokenCounts,
    StartLoc,
    TokenCounts,
    ValueCache,
    WideTokenCounts,
)
from ...validation import validated
from ...validation.cascade import check_dcp_attention
from ...validation.step_shapes import check_rank_lens, check_ranks
from .paged import paged_attention


@typed
def get_dcp_local_seq_lens(
    seq_lens: TokenCounts | WideTokenCounts,
    dcp_world_size: int = 1,
    dcp_rank: int | None = None,
    dcp_kv_cache_interleave_size: int = 1,
) -> RankTokenCounts | TokenCounts:
    """Return how many tokens of each sequence are stored on one rank, or on each rank.

    Args:
        seq_lens: [reqs] tokens of each sequence, int32 or int64.
        dcp_world_size: Number of ranks, at least 1.
        dcp_rank: The rank that is counted. If None, all ranks are.
        dcp_kv_cache_interleave_size: Consecutive positions that go to the same rank, at least 1.

    Returns:
        [reqs] int32 for one rank, [reqs, ranks] for all, even if there is only one.

    Raises:
        ValueError: A number is out of range, or a length is negative or not an int32.

    Source:
        vLLM's function of that name, which drops the axis if there is only one rank.

    Example:
        Positions 0 to 6 on two ranks, interleave size 2: 0 1 4 5 and 2 3 6.

        >>> get_dcp_local_seq_lens(
        ...     torch.tensor([7], dtype=torch.int32),
        ...     dcp_world_size=2,
        ...     dcp_kv_cache_interleave_size=2,
        ... )
        tensor([[4, 3]], dtype=torch.int32)
    """
    check_ranks(dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    check_rank_lens(seq_lens)
    counts = torch.zeros(len(seq_lens), dcp_world_size, dtype=torch.int32, device=HOST)
    for req, seq_len in enumerate(seq_lens.tolist()):
        # step: count the positions that each rank stores
        positions = torch.arange(seq_len, dtype=torch.int64, device=HOST)
        ranks = get_dcp_ranks(positions, dcp_world_size, dcp_kv_cache_interleave_size)
        counts[req] = ranks.bincount(minlength=dcp_world_size)
    # step: select the requested rank
    chosen = counts if dcp_rank is None else counts[:, dcp_rank]
    return chosen.to(seq_lens.device)


@validated(check_dcp_attention)
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

    Every rank gets the same queries. Combined by `lse_weighted_combine`, the results of all ranks
    are attention over the whole sequences.

    Args:
        query: [tokens, query_heads, head_size], request after request.
        key_cache: [num_blocks, block_size, kv_heads, head_size], this rank's.
        value_cache: [num_blocks, block_size, kv_heads, value_head_size], this rank's.
        block_table: [reqs, max_blocks], this rank's. Its keys are stored in the blocks without
            gaps, in the order of their positions.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence on all ranks together, the new ones included.
        max_query_len: At least the number of queries of every request. A captured graph keeps
            this number and the next one, so they must hold for every replay.
        max_seq_len: At least every entry of `seq_lens`.
        dcp_world_size: Number of ranks, at least 1.
        dcp_rank: This rank.
        dcp_kv_cache_interleave_size: Consecutive positions that go to the same rank, at least 1.
        scale, lse, compute_dtype: As in `paged_attention`.
        out: As in `paged_attention`. In float32 nothing is lost before the results are combined.
        options: `logits_soft_cap`, `sinks` (given to every rank, counted on rank 0), `k_scale`
            and `v_scale`.

    Returns:
        `out`. Queries of which the rank keeps no key get 0 and the log-sum-exp -inf.

    Raises:
        NotImplementedError: An option depends on distances, which a rank does not know, or is
            not taken.
        IndexError: A row does not hold the rank's share of a sequence, or a block id is outside
            the cache.
        ValueError: A number is out of range, shapes do not match, or a request has more queries
            than keys.
        TypeError: A dtype is not the expected one.

    Source:
        Juravsky et al., "Hydragen", 2024, section 2.2 (how partial results are combined).

    Example:
        Rank 0 of two keeps positions 0 and 2 of three. The new tokens have positions 1 and 2.

        >>> dcp_attention(
        ...     query=torch.ones(2, 1, 1),
        ...     key_cache=torch.ones(3, 2, 1, 1),
        ...     value_cache=torch.arange(6.0).view(3, 2, 1, 1),
        ...     block_table=torch.tensor([[2]], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        ...     seq_lens=torch.tensor([3], dtype=torch.int32),
        ...     max_query_len=2,
        ...     max_seq_len=3,
        ...     dcp_world_size=2,
        ...     dcp_rank=0,
        ... ).flatten()
        tensor([4.0000, 4.5000])
    """
    # step: find each token's position
    reqs: list[int] = []
    positions: list[int] = []
    query_lens = query_start_loc.diff().tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        reqs += [req] * query_lens[req]
        positions += range(seq_len - query_lens[req], seq_len)
    # step: count the rank's keys up to that position
    device = query.device
    up_to = torch.tensor(positions, dtype=torch.int32, device=device) + 1
    local_lens = get_dcp_local_seq_lens(
        up_to, dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size
    )
    # step: attend to these keys, with one request per token
    return paged_attention(
        query,
        key_cache,
        value_cache,
        block_table[torch.tensor(reqs, dtype=torch.int64, device=device)],
        torch.arange(len(reqs) + 1, dtype=torch.int32, device=device),
        local_lens,
        max_query_len=1,
        max_seq_len=max(local_lens.tolist(), default=0),
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


@typed
def get_dcp_ranks(
    positions: Positions, dcp_world_size: int, dcp_kv_cache_interleave_size: int = 1
) -> Positions:
    """Return the rank that stores each position.

    Args:
        positions: [positions] int64, at least 0.
        dcp_world_size: number of ranks, at least 1.
        dcp_kv_cache_interleave_size: consecutive positions that one rank stores, at least 1.

    Returns:
        [positions] int64, on the device of the positions.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> get_dcp_ranks(
        ...     torch.arange(8), dcp_world_size=2, dcp_kv_cache_interleave_size=2
        ... )
        tensor([0, 0, 1, 1, 0, 0, 1, 1])
    """
    check_ranks(dcp_world_size, None, dcp_kv_cache_interleave_size)
    return positions // dcp_kv_cache_interleave_size % dcp_world_size
