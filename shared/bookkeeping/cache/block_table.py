"""The number of blocks that hold a sequence."""

from ...validation import check_not_negative, check_positive


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold a number of tokens.

    Args:
        num_tokens: tokens, from 0.
        block_size: slots in a block, from 1.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> blocks_needed(num_tokens=9, block_size=4)
        3
    """
    check_not_negative(num_tokens=num_tokens)
    check_positive(block_size=block_size)
    return -(-num_tokens // block_size)
