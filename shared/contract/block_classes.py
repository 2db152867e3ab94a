"""What the block manager returns, and the error that it raises when the cache is full."""

from dataclasses import dataclass


class OutOfBlocks(RuntimeError):
    """More blocks are needed than are free or cached; the failed call changes nothing."""


@dataclass(frozen=True)
class SlotAllocation:
    """What one call of `BlockManager.allocate_slots` did.

    Args:
        new_block_ids: blocks that were handed out for new content. What they hold is undefined.
        blocks_to_copy: (source, destination) pairs for `copy_blocks`. They must be copied in this
            order, before anything is written in this step.
    """

    new_block_ids: list[int]
    blocks_to_copy: list[tuple[int, int]]
