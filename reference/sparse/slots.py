"""Slots for sparse attention: states of groups, sliding windows, and rings.

A layer of sparse attention may have caches that paged attention does not have. All of them are
blocks of slots, and a slot follows from positions in the sequence:

1. `get_compressed_slot_mapping`: a cache with one state per `compress_ratio` tokens. The token that
   completes a group writes its state. State number `g` has the slot that token `g` would have.
2. `compute_swa_indices_and_lens`: the keys that a token attends to, its window and its image, as
   the rows of slots that `sparse_attention` takes.
3. `compute_kpool_tail_slot_mapping`: one block per request, used as a ring. It holds the tokens of
   the group that is not complete yet, so a later token overwrites an earlier one.

Source: DeepSeek-V4, 2026 (compressed and windowed attention); vLLM 0.33.
"""

from collections.abc import Iterator

import torch

from ...contract.kinds import PAD_SLOT_ID
from ...contract.shapes import (
    BlockTable,
    Selected,
    SlotMapping,
    StartLoc,
    TokenCounts,
    TokenFlags,
    TokenRanges,
    TokenRequests,
)
from ...validation import validated
from ...validation.sparse_slots import (
    check_compressed_slots,
    check_swa_indices,
    check_tail_slots,
)


@validated(check_compressed_slots)
def get_compressed_slot_mapping(
    slot_mapping: SlotMapping,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    block_table: BlockTable,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int = 1,
    dcp_kv_cache_interleave_size: int = 1,
) -> SlotMapping:
    """Return the slot of the state that each new token completes.

    Args:
        slot_mapping: [tokens] int64 slots of the tokens themselves. A token with a negative slot
            completes nothing: it is padding, or with context parallelism another rank's.
        query_start_loc: [reqs + 1] start of each request's new tokens.
        seq_lens: [reqs] tokens of each sequence, the new ones included. Tokens before position 0,
            and tokens past the last request, complete nothing.
        block_table: [reqs, max_blocks] of the cache of states.
        block_size: States per block.
        compress_ratio: Tokens per state.
        dcp_world_size, dcp_kv_cache_interleave_size: With decode context parallelism, ranks take
            turns to store this many tokens, a multiple of `compress_ratio`.

    Returns:
        [tokens] int64 slots, -1 where a token completes no group.

    Raises:
        IndexError: A state is past the end of the block table, or an entry is not a block id.
        ValueError: Shapes, devices or starts do not match, or several ranks share a group.
        TypeError: A tensor has another dtype.

    Source:
        vLLM's function of that name (0.33).

    Example:
        Tokens 1 to 4 of a sequence are new. Positions 1 and 3 complete groups 0 and 1 of two
        tokens. Blocks have one state.

        >>> get_compressed_slot_mapping(
        ...     slot_mapping=torch.tensor([21, 22, 23, 24]),
        ...     query_start_loc=torch.tensor([0, 4], dtype=torch.int32),
        ...     seq_lens=torch.tensor([5], dtype=torch.int32),
        ...     block_table=torch.tensor([[7, 2]], dtype=torch.int32),
        ...     block_size=1,
        ...     compress_ratio=2,
        ... )
        tensor([ 7, -1,  2, -1])
    """
    compressed = torch.full_like(slot_mapping, PAD_SLOT_ID)
    interleave, slots = dcp_kv_cache_interleave_size, slot_mapping.tolist()
    for token, req, position in _new_tokens(query_start_loc, seq_lens):
        # step: find the position among those that this rank stores
        turn, offset = divmod(position, interleave)
        local = turn // dcp_world_size * interleave + offset
        # step: skip tokens that complete no group here
        if slots[token] < 0 or position < 0 or (local + 1) % compress_ratio:
            continue
        # step: look up the slot of the group's state
        entry, offset = divmod(local // compress_ratio, block_size)
        compressed[token] = int(block_table[req, entry]) * block_size + offset
    return compressed


@validated(check_swa_indices)
def compute_swa_indices_and_lens(
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    is_valid_token: TokenFlags,
    block_table: BlockTable,
    block_size: int,
    window_size: int,
    index_width: int,
    causal: bool = True,
    query_ranges: TokenRanges | None = None,
    max_image_tokens: int = 0,
    replay_start: TokenCounts | None = None,
) -> tuple[Selected, TokenRequests]:
    """Return the slots of the keys that each token attends to, and how many they are.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        seq_lens: [reqs] tokens of each sequence, the new ones included.
        is_valid_token: [tokens] bool. Other tokens, and those past the last request, have no key.
        block_table: [reqs, max_blocks] block ids in sequence order.
        block_size: Slots per block.
        window_size: Visible keys, the token's own included.
        index_width: Columns of the result. At least `window_size`; with ranges at least
            max(window_size, max_image_tokens) + max_image_tokens, or if not causal + the new
            tokens of a request.
        causal: Whether the window ends at the token. If not, it ends before the request's new
            tokens, and all of these are visible too, as in a block of drafts.
        query_ranges: Optional. [tokens, 2] int32 first and last position of the image that a token
            is part of. Ranges without the token's position, such as (-1, -1), mean none. If None,
            no token is part of an image.
        max_image_tokens: Of its image a token attends to at most this many later tokens, and to so
            many earlier ones with itself. 0 without ranges.
        replay_start: Optional. [reqs] int32 first position whose key is stored. If None, it is 0.

    Returns:
        [tokens, index_width] int32 slots in the order of positions, -1 after the last one; and
        [tokens] int32 keys of each token.

    Raises:
        IndexError: A sequence is longer than its row, or an entry is not a block id.
        ValueError: Rows are too short, ranges and `max_image_tokens` are not given together, or
            shapes, devices or starts do not match.
        TypeError: A tensor has another dtype.

    Source:
        vLLM's `_compute_swa_indices_and_lens_kernel` (0.33) and its variants for images and for
        drafts.

    Example:
        A window of two, and an image at positions 1 to 3. Position 4 is after it.

        >>> slots, lens = compute_swa_indices_and_lens(
        ...     query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        ...     seq_lens=torch.tensor([5], dtype=torch.int32),
        ...     is_valid_token=torch.tensor([True, True]),
        ...     block_table=torch.tensor([[7, 2]], dtype=torch.int32),
        ...     block_size=4,
        ...     window_size=2,
        ...     index_width=6,
        ...     query_ranges=torch.tensor([[1, 3], [-1, -1]], dtype=torch.int32),
        ...     max_image_tokens=3,
        ... )
        >>> slots.tolist(), lens.tolist()
        ([[29, 30, 31, -1, -1, -1], [31, 8, -1, -1, -1, -1]], [3, 2])
    """
    tokens, starts = is_valid_token.shape[0], query_start_loc.tolist()
    slots = block_table.new_full((tokens, index_width), PAD_SLOT_ID)
    lens = block_table.new_zeros(tokens)
    for token, req, position in _new_tokens(query_start_loc, seq_lens):
        if not is_valid_token[token]:
            continue
        # step: find the first and the last key of the window
        first, last = position - window_size + 1, position
        if not causal:
            context = int(seq_lens[req]) - (starts[req + 1] - starts[req])
            first, last = context - window_size, int(seq_lens[req]) - 1
        # step: add the keys of the token's image
        if query_ranges is not None:
            start, end = query_ranges[token].tolist()
            if start <= position <= end:
                first = min(first, max(start, position - max_image_tokens + 1))
                last = max(last, min(end, position + max_image_tokens))
        # step: leave out keys that are not stored
        stored = 0 if replay_start is None else int(replay_start[req])
        keys = range(max(first, stored, 0), min(last + 1, int(seq_lens[req])))
        # step: look up their slots in the request's row
        for column, key in enumerate(keys):
            block_id = int(block_table[req, key // block_size])
            slots[token, column] = block_id * block_size + key % block_size
        lens[token] = len(keys)
    return slots, lens


@validated(check_tail_slots)
def compute_kpool_tail_slot_mapping(
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    block_table: BlockTable,
    kpool: int,
    num_tokens: int,
) -> SlotMapping:
    """Return the slot of each new token in the ring of its request.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        seq_lens: [reqs] tokens of each sequence, the new ones included.
        block_table: [reqs, max_blocks]. Column 0 has the block of each request's ring; block 0 is
            the null block, so a request with it has no ring.
        kpool: Slots of a ring.
        num_tokens: Number of slots to return.

    Returns:
        [num_tokens] int64 slots; -1 for tokens that a later one of the step overwrites, tokens
        without a ring, and tokens past the last request.

    Raises:
        IndexError: An entry is not a block id.
        ValueError: Two requests have one ring, or shapes, devices or starts do not match.
        TypeError: A tensor is not int32.

    Source:
        vLLM's function of that name (0.33), which gives all tokens of a step a slot.

    Example:
        Positions 3 to 5 are new, and a ring has two slots. Position 5 overwrites position 3.

        >>> compute_kpool_tail_slot_mapping(
        ...     query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        ...     seq_lens=torch.tensor([6], dtype=torch.int32),
        ...     block_table=torch.tensor([[7]], dtype=torch.int32),
        ...     kpool=2,
        ...     num_tokens=4,
        ... )
        tensor([-1, 14, 15, -1])
    """
    slots = block_table.new_full((num_tokens,), PAD_SLOT_ID, dtype=torch.int64)
    for token, req, position in _new_tokens(query_start_loc, seq_lens):
        # step: skip tokens without a ring, and those that are overwritten in this step
        block_id, left = int(block_table[req, 0]), int(query_start_loc[req + 1]) - token
        if block_id == 0 or position < 0 or left > kpool:
            continue
        # step: wrap the position at the end of the ring
        slots[token] = block_id * kpool + position % kpool
    return slots


def _new_tokens(
    query_start_loc: StartLoc, seq_lens: TokenCounts
) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the request and the position of each new token."""
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        for token in range(starts[req], starts[req + 1]):
            yield token, req, seq_len - starts[req + 1] + token
