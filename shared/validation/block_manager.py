"""Validation of the block manager's arguments."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from ..contract.block_classes import OutOfBlocks
from ..contract.checks import check_hashable
from ..contract.extra_keys import check_extra_keys
from ..contract.integers import as_int, as_list

NO_BLOCKS = ()
"""The default of `computed_blocks`; it needs no validation."""

LARGEST_ID = 2**31 - 1
"""The largest block id: block tables hold 32 bits."""


def check_manager(
    num_blocks: int,
    block_size: int,
    seed: int | None,
    enable_caching: bool,
    sliding_window: int | None,
) -> None:
    """Raise an error for sizes that a cache cannot have."""
    as_int("num_blocks", num_blocks, 1, LARGEST_ID + 1)
    as_int("block_size", block_size, 1)
    if seed is not None:
        as_int("seed", seed, smallest=-(2**63))
    if not isinstance(enable_caching, bool):
        raise TypeError(f"enable_caching = {enable_caching!r:.60}: expected a bool")
    if sliding_window is not None:
        as_int("sliding_window", sliding_window, 1)
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks = {num_blocks}: expected at least 2 with a sliding window, as no"
                " request gets block 0"
            )


def check_token_ids(token_ids: Any, extra_keys: Any) -> None:
    """Raise TypeError for tokens that are not a sequence, and for extra keys of another type."""
    if type(token_ids) not in (list, tuple):
        as_list("token_ids", token_ids, "ints")
    check_extra_keys(extra_keys)


def check_request_known(
    name: str, request_id: Hashable, known: Collection[Hashable]
) -> None:
    """Raise KeyError if a request holds no blocks."""
    check_hashable(name, request_id)
    if request_id not in known:
        raise KeyError(
            f"{name} = {request_id!r} holds no blocks: expected one that allocate_slots or"
            " fork was called for, and that was not freed since"
        )


def check_fork(
    parent_id: Hashable, child_id: Hashable, known: Collection[Hashable]
) -> None:
    """Raise if the parent holds no blocks, or the child holds some already."""
    check_request_known("parent_id", parent_id, known)
    check_hashable("child_id", child_id)
    if child_id in known:
        raise ValueError(
            f"child_id = {child_id!r} holds blocks already: expected a new request id"
        )


def check_allocate_slots(
    request_id: Hashable,
    num_computed_tokens: int,
    row: Sequence[int],
    computed_blocks: Sequence[int] | None,
    block_size: int,
    first_visible: int,
    null_block_id: int | None,
) -> None:
    """Validate the count of computed tokens of `allocate_slots`.

    Args:
        request_id: for the message.
        num_computed_tokens: tokens in the cache.
        row: the request's blocks; of a new request, those found in the prefix cache.
        computed_blocks: Optional. What a request that holds blocks already got with its tokens. If
            None, the request is new.
        block_size: slots per block.
        first_visible: index of the first block that the new tokens attend to.
        null_block_id: Optional. The null block. If None, the cache has none.
    """
    num_slots = len(row) * block_size
    if computed_blocks is None:
        if num_computed_tokens != num_slots:
            raise ValueError(
                f"num_computed_tokens = {num_computed_tokens}: expected {num_slots}, the slots of"
                f" the {len(row)} computed_blocks of new request {request_id!r}"
            )
        return
    if computed_blocks is not NO_BLOCKS and as_list(
        "computed_blocks", computed_blocks, "ints"
    ):
        raise ValueError(
            f"computed_blocks = {list(computed_blocks)}: expected none, as request"
            f" {request_id!r} holds blocks already; pass them with its first tokens"
        )
    if num_computed_tokens > num_slots:
        raise ValueError(
            f"num_computed_tokens = {num_computed_tokens}: expected at most {num_slots}, the slots"
            f" of the {len(row)} blocks of request {request_id!r}"
        )
    has_null = null_block_id is not None
    if has_null and row[first_visible : first_visible + 1] == [null_block_id]:
        raise ValueError(
            f"num_computed_tokens = {num_computed_tokens}: expected more, as request"
            f" {request_id!r} has released block {first_visible} of its row, which the sliding"
            " window had passed; free the request and compute it again"
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
    # any integer has the right type
    if not 0 <= as_int("block_id", block_id, -(2**63), 2**63) < num_blocks:
        raise IndexError(
            f"block_id = {block_id}: expected 0 <= block_id < {num_blocks}"
        )
