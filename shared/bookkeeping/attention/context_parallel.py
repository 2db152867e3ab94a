"""The rank that keeps each position of a sequence."""

from ...contract.shapes import Positions
from ...validation.step_shapes import check_ranks


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
