"""The rank that keeps each position of a sequence."""

from ...contract.shapes import Positions
from ...validation.step_shapes import check_ranks


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
