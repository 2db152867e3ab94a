"""Slots for sparse attention: states of groups, sliding windows, and rings.

All tokens are computed at once by a few operations of torch, with shapes that the host knows. So a
captured CUDA graph may contain the calls. States and windows are positions in a sequence, whose
slots `convert_req_index_to_global_index` looks up.
"""

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
from ...contract.step_positions import step_positions
from ...validation import values_checked
from ...validation.sparse_slots import (
    check_compressed_slots,
    check_swa_indices,
    check_tail_slots,
)
from ..runtime.operators import operator
from .attention import convert_req_index_to_global_index


@operator()
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
    """Return the slot of the state that each new token completes."""
    check_compressed_slots(
        slot_mapping, query_start_loc, seq_lens, block_table, block_size, compress_ratio,
        dcp_world_size, dcp_kv_cache_interleave_size, contents=values_checked(slot_mapping),
    )  # fmt: skip
    req, position = step_positions(query_start_loc, seq_lens, slot_mapping.shape[0])
    # step: find the position among those that this rank stores
    turn = position // dcp_kv_cache_interleave_size
    offset = position % dcp_kv_cache_interleave_size
    local = turn // dcp_world_size * dcp_kv_cache_interleave_size + offset
    # step: skip tokens that complete no group here
    completes = (slot_mapping >= 0) & (position >= 0)
    completes &= (local + 1) % compress_ratio == 0
    state = torch.where(completes, local // compress_ratio, -1)
    # step: look up the slot of the group's state
    slots, _ = convert_req_index_to_global_index(
        req.int(), block_table, state[:, None].int(), block_size
    )
    return slots[:, 0].long()


@operator(sizes={"selected": "index_width"})
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
    """Return the slots of the keys that each token attends to, and how many they are."""
    check_swa_indices(
        query_start_loc, seq_lens, is_valid_token, block_table, block_size, window_size,
        index_width, causal, query_ranges, max_image_tokens, replay_start,
        contents=values_checked(block_table),
    )  # fmt: skip
    tokens = is_valid_token.shape[0]
    if not seq_lens.numel():
        none = block_table.new_full((tokens, index_width), PAD_SLOT_ID)
        return none, block_table.new_zeros(tokens)
    req, position = step_positions(query_start_loc, seq_lens, tokens)
    req = torch.where(is_valid_token, req, -1)
    owner = req.clamp(min=0)
    # step: find the first and the last key of the window
    first, last = position - window_size + 1, position
    if not causal:
        new = query_start_loc.diff()
        first, last = (seq_lens - new - window_size)[owner], (seq_lens - 1)[owner]
    # step: add the keys of the token's image
    if query_ranges is not None:
        start, end = query_ranges.unbind(1)
        is_inside = (start <= position) & (position <= end)
        left = first.minimum(start.maximum(position - max_image_tokens + 1))
        right = last.maximum(end.minimum(position + max_image_tokens))
        first = torch.where(is_inside, left, first)
        last = torch.where(is_inside, right, last)
    # step: leave out keys that are not stored
    first, last = first.clamp(min=0), last.minimum(seq_lens[owner] - 1)
    if replay_start is not None:
        first = first.maximum(replay_start[owner])
    column = torch.arange(index_width, device=block_table.device)
    key = first[:, None] + column
    key = torch.where(key <= last[:, None], key, -1)
    # step: look up their slots in the request's row
    return convert_req_index_to_global_index(
        req.int(), block_table, key.int(), block_size
    )


@operator(sizes={"slots": "num_tokens"})
def compute_kpool_tail_slot_mapping(
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    block_table: BlockTable,
    kpool: int,
    num_tokens: int,
) -> SlotMapping:
    """Return the slot of each new token in the ring of its request."""
    check_tail_slots(
        query_start_loc, seq_lens, block_table, kpool, num_tokens,
        contents=values_checked(block_table),
    )  # fmt: skip
    req, position = step_positions(query_start_loc, seq_lens, num_tokens)
    if not seq_lens.numel():
        return req
    owner = req.clamp(min=0)
    # step: skip tokens without a ring, and those that are overwritten in this step
    block_id = block_table[:, 0].long()[owner]
    is_last = position + kpool >= seq_lens[owner]
    has_slot = (req >= 0) & (block_id != 0) & (position >= 0) & is_last
    # step: wrap the position at the end of the ring
    return torch.where(has_slot, block_id * kpool + position % kpool, PAD_SLOT_ID)
