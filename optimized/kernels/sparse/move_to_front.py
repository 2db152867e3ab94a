"""Compaction of rows on the device, with shapes that do not depend on their contents."""

import torch
from torch import Tensor


def move_to_front(rows: Tensor) -> Tensor:
    """Return rows whose entries from 0 on are first, in their order; the others are -1.

    Args:
        rows: [tokens, entries].
    """
    columns = rows.shape[1]
    counted = (rows >= 0).cumsum(1)
    # where the first, the second ... entry is. A scatter has no order of its own, and torch rejects
    # it on a GPU if algorithms have to be deterministic
    wanted = torch.arange(1, columns + 1, device=rows.device).repeat(len(rows), 1)
    place = torch.searchsorted(counted, wanted)
    moved = rows.gather(1, place.clamp(max=max(columns - 1, 0)))
    return moved.where(place < columns, -1)
