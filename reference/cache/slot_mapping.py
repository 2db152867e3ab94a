"""Slot mapping: the cache slot of every new token.

The cache is an array of slots, divided into blocks of `block_size`. The blocks of a sequence are
listed in order in its row of the block table. The slot of a token follows from its position:
entry position // block_size of the row is the block, and position % block_size is the offset in it.
"""

from collections.abc import Sequence

import torch

from ...contract.argument_types import typed
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.shapes import BlockTable, SlotMapping, StartLoc, TokenCounts
from ...validation import (
    check_batch,
    check_not_negative,
    check_one_sequence,
    check_slot_mapping_device,
    validated,
)


@validated(check_one_sequence)
def compute_slot_mapping(
    is_profile_run: bool,
    seq_len: int,
    context_len: int,
    start_idx: int,
    block_size: int,
    block_table: Sequence[int] | None,
) -> SlotMapping:
    """Return the cache slot of every new token of one sequence.

    Args:
        is_profile_run: whether the engine only measures memory. The cache does not exist yet, so
            every token of the sequence is new and none has a slot.
        seq_len: tokens of the sequence, the new ones included.
        context_len: tokens already in the cache.
        start_idx: first position that is stored. New tokens before it get PAD_SLOT_ID.
        block_size: slots in a block.
        block_table: [max_blocks] block ids, in sequence order. Entries past the end of the
            sequence are never read. Optional in a profile run.

    Returns:
        [tokens] int64 slot numbers, or PAD_SLOT_ID.

    Raises:
        IndexError: a position is past the end of the block table.
        ValueError: a length is out of range, or the block table is missing.

    Source:
        vLLM's function of that name.

    Example:
        >>> compute_slot_mapping(
        ...     is_profile_run=False,
        ...     seq_len=10,
        ...     context_len=3,
        ...     start_idx=4,
        ...     block_size=4,
        ...     block_table=[7, 2, 5],
        ... )
        tensor([-1,  8,  9, 10, 11, 20, 21])
    """
    if is_profile_run or block_table is None:
        return torch.full((seq_len,), PAD_SLOT_ID, dtype=torch.int64, device=HOST)
    slots = []
    for position in range(context_len, seq_len):
        if position < start_idx:
            slots.append(PAD_SLOT_ID)
            continue
        # step: look up the block
        block_id = int(block_table[position // block_size])
        # step: add the offset in the block
        slots.append(block_id * block_size + position % block_size)
    return torch.tensor(slots, dtype=torch.int64, device=HOST)


@validated(check_batch)
def compute_slot_mapping_batch(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    block_size: int,
) -> SlotMapping:
    """Return the cache slot of every new token of a batch, computed on the host.

    Args:
        query_lens: [reqs] new tokens of each request.
        num_computed_tokens: [reqs] tokens already in the cache.
        block_rows: [reqs] rows of block ids; entries past a sequence's end are never read.
        block_size: slots in a block.

    Returns:
        [tokens] int64, in request order.

    Raises:
        IndexError: a sequence is longer than its row.
        ValueError: lists of different lengths, or a negative count.

    Example:
        >>> compute_slot_mapping_batch(
        ...     query_lens=[1, 3],
        ...     num_computed_tokens=[4, 0],
        ...     block_rows=[[7, 2], [5]],
        ...     block_size=4,
        ... )
        tensor([ 8, 20, 21, 22])
    """
    slots = [torch.empty(0, dtype=torch.int64, device=HOST)]
    batch = zip(query_lens, num_computed_tokens, block_rows, strict=True)
    for query_len, computed, row in batch:
        slots.append(
            compute_slot_mapping(
                is_profile_run=False,
                seq_len=computed + query_len,
                context_len=computed,
                start_idx=0,
                block_size=block_size,
                block_table=row[: -(-(computed + query_len) // block_size)],
            )
        )
    return torch.cat(slots)


@validated(check_slot_mapping_device)
def compute_slot_mapping_device(
    query_start_loc: StartLoc,
    num_computed_tokens: TokenCounts,
    block_table: BlockTable,
    block_size: int,
    num_tokens: int,
) -> SlotMapping:
    """Return the cache slot of every new token of a batch, computed on the block table's device.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        num_computed_tokens: [reqs] tokens already in the cache.
        block_table: [reqs, max_blocks].
        block_size: slots in a block.
        num_tokens: number of slots to return. Tokens past the last request (in a batch padded
            to a captured size) get PAD_SLOT_ID.

    Returns:
        [num_tokens] int64, on the device of the block table.

    Raises:
        IndexError: a sequence is longer than its row.
        ValueError: lengths that are inconsistent.
        TypeError: starts, counts or table that are not int32.

    Source:
        vLLM's V1 model runner, which computes it in every step before the cache write.

    Example:
        >>> compute_slot_mapping_device(
        ...     query_start_loc=torch.tensor([0, 1, 4], dtype=torch.int32),
        ...     num_computed_tokens=torch.tensor([4, 0], dtype=torch.int32),
        ...     block_table=torch.tensor([[7, 2], [5, 0]], dtype=torch.int32),
        ...     block_size=4,
        ...     num_tokens=5,
        ... )
        tensor([ 8, 20, 21, 22, -1])
    """
    slots = compute_slot_mapping_batch(
        query_start_loc.diff().tolist(),
        num_computed_tokens.tolist(),
        block_table.tolist(),
        block_size,
    )
    slot_mapping = torch.full(
        (num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=HOST
    )
    slot_mapping[: len(slots)] = slots
    return slot_mapping.to(block_table.device)


@typed
def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """Return the first position whose key and value need to be stored.

    With a sliding window, later tokens see only the last `sliding_window` tokens of a prompt, so
    earlier tokens get no slot. A decode always stores its token.

    Args:
        is_prompt: whether the sequence is still in its prompt.
        query_len: new tokens.
        context_len: tokens already in the cache.
        sliding_window: Optional. Number of visible keys, the query's own included. If None, all
            keys are visible.

    Returns:
        A position in the sequence.

    Raises:
        ValueError: a negative length.

    Source:
        vLLM's function of that name.

    Example:
        >>> compute_slot_mapping_start_idx(
        ...     is_prompt=True, query_len=6, context_len=4, sliding_window=8
        ... )
        2
    """
    check_not_negative(query_len=query_len, context_len=context_len)
    if not is_prompt or sliding_window is None:
        return 0
    check_not_negative(sliding_window=sliding_window)
    return max(0, context_len + query_len - sliding_window)
