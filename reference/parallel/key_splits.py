"""Fixed splits of a sequence's keys: which rank stores a split, and where."""

import torch
from torch import Tensor

from ...contract.kinds import HOST
from ...contract.parallel import KeySplits


def stored_splits(
    splits: KeySplits, world_size: int, rank: int, interleave_size: int
) -> list[int]:
    """Return the splits whose keys a rank stores, in order.

    Example:
        >>> stored_splits(
        ...     KeySplits(count=8, run=1), world_size=2, rank=1, interleave_size=2
        ... )
        [2, 3, 6, 7]
    """
    first = [split * splits.run for split in range(splits.count)]
    return [
        split
        for split, position in enumerate(first)
        if position // interleave_size % world_size == rank
    ]


def order_of_partials(
    splits: KeySplits, world_size: int, interleave_size: int
) -> list[int]:
    """Return the index of each split among the partial results of rank 0, of rank 1, and so on.

    Example:
        >>> order_of_partials(KeySplits(count=4, run=1), world_size=2, interleave_size=1)
        [0, 2, 1, 3]
    """
    found = [
        split
        for rank in range(world_size)
        for split in stored_splits(splits, world_size, rank, interleave_size)
    ]
    return sorted(range(splits.count), key=found.__getitem__)


def offsets_of_runs(
    splits: KeySplits, split: int, num_runs: int, world_size: int, interleave_size: int
) -> Tensor:
    """Return where the runs of a split start among the keys that its rank stores.

    Args:
        num_runs: The first ones are returned.

    Returns:
        [num_runs] int64 offsets in slots, on the host.

    Example:
        Split 2 of four has positions 2, 6 and 10. On rank 0 of two, which stores every second
        position, these are keys 1, 3 and 5.

        >>> offsets_of_runs(
        ...     KeySplits(count=4, run=1), 2, 3, world_size=2, interleave_size=1
        ... )
        tensor([1, 3, 5])
    """
    run = torch.arange(num_runs, dtype=torch.int64, device=HOST)
    position = (run * splits.count + split) * splits.run
    rounds = position // (interleave_size * world_size)
    return rounds * interleave_size + position % interleave_size
