"""Which rank keeps which tokens of a long sequence?

Nothing is dealt out: whole rounds are counted by a division, and the rest of a sequence goes to the
first ranks. All of it runs where the lengths lie.
"""

import torch

from ..shared.refusals.step_shapes import check_ranks
from ..shared.shapes import Positions, RankTokenCounts, TokenCounts


def get_dcp_ranks(
    positions: Positions, dcp_world_size: int, dcp_kv_cache_interleave_size: int = 1
) -> Positions:
    """Return the rank that keeps each position."""
    check_ranks(dcp_world_size, None, dcp_kv_cache_interleave_size)
    return positions // dcp_kv_cache_interleave_size % dcp_world_size


def get_dcp_local_seq_lens(
    seq_lens: TokenCounts,
    dcp_world_size: int = 1,
    dcp_rank: int | None = None,
    dcp_kv_cache_interleave_size: int = 1,
) -> RankTokenCounts | TokenCounts:
    """Return how many tokens of each sequence lie on a rank, or on every rank."""
    check_ranks(dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    # step: deal the positions out and count each rank's
    in_a_row = dcp_kv_cache_interleave_size
    dealt_in_a_round = in_a_row * dcp_world_size
    rounds = seq_lens // dealt_in_a_round
    ranks = torch.arange(dcp_world_size, dtype=torch.int32, device=seq_lens.device)
    rest = (seq_lens % dealt_in_a_round)[:, None] - ranks * in_a_row
    counts = rounds[:, None] * in_a_row + rest.clamp(0, in_a_row)
    # step: keep the rank that was asked for
    return counts if dcp_rank is None else counts[:, dcp_rank]
