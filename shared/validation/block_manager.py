"""Validation of the block manager's arguments."""

from collections.abc import Collection, Hashable, Sequence

from ..contract.block_classes import OutOfBlocks
from .primitives import check_not_negative, check_positive


def check_request_known(request_id: Hashable, known: Collection[Hashable]) -> None:
    """Raise KeyError if a request holds no blocks."""
    if request_id not in known:
        raise KeyError(
            f"request_id = {request_id!r} holds no blocks: expected one that allocate_slots or"
            " fork was called for, and that was not freed since"
        )


def check_fork(
    parent_id: Hashable, child_id: Hashable, known: Collection[Hashable]
) -> None:
    """Raise if the parent holds no blocks, or the child holds some already."""
    check_request_known(parent_id, known)
    if child_id in known:
        raise ValueError(
            f"child_id = {child_id!r} holds blocks already: expected a new request id"
        )


def check_allocate_slots(
    request_id: Hashable,
    num_computed_tokens: int,
    num_new_tokens: int,
    row: Sequence[int] | None,
    computed_blocks: Sequence[int],
    block_size: int,
) -> None:
    """Validate the token counts of `allocate_slots`.

    Args:
        request_id: for the message.
        num_computed_tokens: tokens in the cache.
        num_new_tokens: tokens to be written.
        row: the request's blocks. None for a request that holds none yet.
        computed_blocks: blocks found in the prefix cache.
        block_size: slots per block.
    """
    check_not_negative(num_computed_tokens=num_computed_tokens)
    check_positive(num_new_tokens=num_new_tokens)
    if row is None:
        if num_computed_tokens != len(computed_blocks) * block_size:
            raise ValueError(
                f"num_computed_tokens = {num_computed_tokens}: expected"
                f" {len(computed_blocks) * block_size}, the slots of the"
                f" {len(computed_blocks)} computed_blocks of new request {request_id!r}"
            )
        return
    if computed_blocks:
        raise ValueError(
            f"computed_blocks = {list(computed_blocks)}: expected none, as request"
            f" {request_id!r} holds blocks already; pass them with its first tokens"
        )
    if num_computed_tokens > len(row) * block_size:
        raise ValueError(
            f"num_computed_tokens = {num_computed_tokens}: expected at most"
            f" {len(row) * block_size}, the slots of the {len(row)} blocks of request"
            f" {request_id!r}"
        )


def check_chain(computed_blocks: Sequence[int], follows: Sequence[bool]) -> None:
    """Raise ValueError unless each block holds cached content that continues the one before.

    Args:
        computed_blocks: block ids.
        follows: [computed_blocks] whether that is so.
    """
    for index, is_next in enumerate(follows):
        if not is_next:
            raise ValueError(
                f"computed_blocks[{index}] = {computed_blocks[index]} holds no cached content"
                " that continues the blocks before it: expected what get_computed_blocks"
                " returned, with no allocation in between"
            )


def check_enough_blocks(
    request_id: Hashable, needed: int, num_free: int, num_cached: int, num_blocks: int
) -> None:
    """Raise OutOfBlocks if fewer blocks can be handed out than are needed."""
    if needed > num_free + num_cached:
        raise OutOfBlocks(
            f"request {request_id!r} needs {needed} new blocks, and of {num_blocks} blocks"
            f" {num_free} are free and {num_cached} are cached and unused: expected at most"
            f" {num_free + num_cached}; free a request first"
        )


def check_computed_tokens(
    num_computed_tokens: int, num_tokens: int, num_blocks: int, block_size: int
) -> None:
    """Raise if more tokens are said to be computed than are known or have slots."""
    check_not_negative(num_computed_tokens=num_computed_tokens)
    limits = (
        (num_tokens, "the tokens in token_ids"),
        (num_blocks * block_size, f"the slots of the request's {num_blocks} blocks"),
    )
    for limit, what in limits:
        if num_computed_tokens > limit:
            raise ValueError(
                f"num_computed_tokens = {num_computed_tokens}: expected at most {limit}, {what}"
            )


def check_block_id(block_id: int, num_blocks: int) -> None:
    """Raise IndexError for a block that does not exist."""
    if not 0 <= block_id < num_blocks:
        raise IndexError(
            f"block_id = {block_id}: expected 0 <= block_id < {num_blocks}"
        )
