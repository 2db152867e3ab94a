"""Compaction of rows on the device, with shapes that do not depend on their contents."""

from torch import Tensor


def move_to_front(rows: Tensor) -> Tensor:
    """Return rows whose entries from 0 on are first, in their order; the others are -1.

    Args:
        rows: [tokens, entries].
    """
    is_entry = rows >= 0
    target = is_entry.cumsum(1) - 1
    # the last column takes what is left out
    moved = rows.new_full((rows.shape[0], rows.shape[1] + 1), -1)
    moved.scatter_(1, target.where(is_entry, rows.shape[1]), rows)
    return moved[:, :-1].contiguous()
