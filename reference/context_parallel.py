"""Which rank keeps which tokens of a long sequence?

Decode context parallelism spreads one sequence's keys and values over several devices, so that each
reads only its share. Positions are dealt out like cards: `interleave_size` in a row to rank 0, as
many to rank 1, and so on in turn. Each rank attends to its own share, and the partial results are
joined by their log-sum-exp.
"""

import torch

from ..shared.kinds import HOST
from ..shared.refusals.step_shapes import check_ranks
from ..shared.shapes import Positions, RankTokenCounts, TokenCounts


def get_dcp_ranks(
    positions: Positions, dcp_world_size: int, dcp_kv_cache_interleave_size: int = 1
) -> Positions:
    """Return the rank that keeps each position.

    Args:
        positions: [positions] int64, from 0.
        dcp_world_size: ranks, from 1.
        dcp_kv_cache_interleave_size: positions in a row that go to the same rank, from 1.

    Returns:
        [positions] int64, where the positions lie.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> get_dcp_ranks(
        ...     torch.arange(8), dcp_world_size=2, dcp_kv_cache_interleave_size=2
        ... )
        tensor([0, 0, 1, 1, 0, 0, 1, 1])
    """
    check_ranks(dcp_world_size, None, dcp_kv_cache_interleave_size)
    return positions // dcp_kv_cache_interleave_size % dcp_world_size


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
