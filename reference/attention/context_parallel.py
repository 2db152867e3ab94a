"""Decode context parallelism: one sequence's keys distributed over ranks.

Decode context parallelism spreads one sequence's keys and values over several devices, so that each
reads only its share. Positions are dealt out like cards: `interleave_size` in a row to rank 0, as
many to rank 1, and so on in turn, and a rank packs what it gets without gaps. So a new token sees a
first part of each rank's share: as many keys as the rank got of the positions up to the token's.
Each rank attends to that, and the partial results are joined by their log-sum-exp.
"""

from dataclasses import replace

import torch

from ...bookkeeping.attention.context_parallel import get_dcp_ranks as get_dcp_ranks
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.kinds import HOST
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
)
from ...validation.cascade import check_dcp_attention
from ...validation.step_shapes import check_ranks
from .paged import paged_attention


def get_dcp_local_seq_lens(
    seq_lens: TokenCounts,
    dcp_world_size: int = 1,
    dcp_rank: int | None = None,
    dcp_kv_cache_interleave_size: int = 1,
) -> RankTokenCounts | TokenCounts:
    """Return how many tokens of each sequence lie on a rank, or on every rank.

    Args:
        seq_lens: [reqs] tokens of each sequence.
        dcp_world_size: ranks, from 1.
        dcp_rank: the rank asked for; None: all.
        dcp_kv_cache_interleave_size: positions in a row that go to the same rank, from 1.

    Returns:
        [reqs] int32 for one rank, [reqs, ranks] for all, also if there is only one.

    Raises:
        ValueError: a number out of range.

    Source:
        vLLM's function of that name, which drops the axis if there is only one rank.

    Example:
        Positions 0 to 6 on two ranks, two in a row: 0 1 4 5 and 2 3 6.

        >>> get_dcp_local_seq_lens(
        ...     torch.tensor([7], dtype=torch.int32),
        ...     dcp_world_size=2,
        ...     dcp_kv_cache_interleave_size=2,
        ... )
        tensor([[4, 3]], dtype=torch.int32)
    """
    check_ranks(dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    counts = torch.zeros(len(seq_lens), dcp_world_size, dtype=torch.int32, device=HOST)
    for req, seq_len in enumerate(seq_lens.tolist()):
        # step: deal the positions out and count each rank's
        positions = torch.arange(seq_len, dtype=torch.int64, device=HOST)
        ranks = get_dcp_ranks(positions, dcp_world_size, dcp_kv_cache_interleave_size)
        counts[req] = ranks.bincount(minlength=dcp_world_size)
    # step: keep the rank that was asked for
    chosen = counts if dcp_rank is None else counts[:, dcp_rank]
    return chosen.to(seq_lens.device)


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

    Every rank gets the same queries. Joined by `lse_weighted_combine`, what all ranks return is
    attention over the whole sequences.

    Args:
        query: [tokens, query_heads, head_size], request after request.
        key_cache: [num_blocks, block_size, kv_heads, head_size], this rank's.
        value_cache: [num_blocks, block_size, kv_heads, value_head_size], this rank's.
        block_table: [reqs, max_blocks], this rank's; its keys lie in them without gaps, in the
            order of their positions.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence on all ranks together, the new ones included.
        max_query_len: at least the queries of every request.
        max_seq_len: at least every entry of `seq_lens`.
        dcp_world_size: ranks, from 1.
        dcp_rank: this one.
        dcp_kv_cache_interleave_size: positions in a row that go to the same rank, from 1.
        scale: what scores are multiplied with; None: 1 / sqrt(head_size).
        out: [tokens, query_heads, value_head_size], changed; float32 loses nothing before the
            join. None: a new tensor like `query`.
        lse: [query_heads, tokens] float32 or float64, changed: the natural log-sum-exp of each
            query's scaled scores on this rank; None: not wanted.
        compute_dtype: the dtype of all arithmetic.
        logits_soft_cap: cap c turns a scaled score s into c * tanh(s / c); None: no cap.
        sinks: [query_heads] float32, given to every rank; rank 0 alone lets them take weight.
        k_scale, v_scale: what the numbers of an FP8 cache are multiplied with.
        sliding_window, attention_chunk_size, alibi_slopes, position_bias, query_ranges: refused.

    Returns:
        `out`. Queries of which the rank keeps no key get 0 and the log-sum-exp -inf.

    Raises:
        NotImplementedError: an option that counts positions, of which a rank has only some.
        IndexError: a share of a sequence that its row does not hold, or a block id outside the
            cache.
        ValueError: a number out of range, shapes that do not fit, more queries than keys.
        TypeError: dtypes that do not fit.

    Source:
        vLLM's decode context parallelism; the join is that of section 2.2 of Juravsky et al.,
        "Hydragen", 2024.

    Example:
        Rank 0 of two keeps positions 0 and 2 of three. The new tokens stand at 1 and 2.

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
    of_rank = (dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    max_local_len = check_dcp_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        *of_rank,
        out,
        lse,
        options,
        contents=True,
    )
    # step: find each token's position
    reqs: list[int] = []
    positions: list[int] = []
    query_lens = query_start_loc.diff().tolist()
    for req, (query_len, seq_len) in enumerate(
        zip(query_lens, seq_lens.tolist(), strict=True)
    ):
        reqs += [req] * query_len
        positions += range(seq_len - query_len, seq_len)
    # step: count the rank's keys up to there
    device = query.device
    up_to = torch.tensor(positions, dtype=torch.int32, device=device) + 1
    local_lens = get_dcp_local_seq_lens(up_to, *of_rank)
    # step: attend to those, every token a request of its own
    return paged_attention(
        query,
        key_cache,
        value_cache,
        block_table[torch.tensor(reqs, dtype=torch.int64, device=device)],
        torch.arange(len(reqs) + 1, dtype=torch.int32, device=device),
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
