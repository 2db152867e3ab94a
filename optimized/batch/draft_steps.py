"""Steps of a draft model: lengths, slots and tokens that the host does not know.

A few operations of torch on the device. None of them waits for it, and shapes depend on arguments
of the host alone, so a captured CUDA graph may contain them.
"""

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.kinds import PAD_SLOT_ID
from ...contract.shapes import (
    BlockTable,
    Positions,
    SampledTokens,
    SlotMapping,
    StartLoc,
    StepPositions,
    TokenCounts,
)
from ...validation import values_checked
from ...validation.draft_steps import (
    check_draft_inputs,
    check_eagle_step,
    check_next_tokens,
    check_token_to_req,
)


@typed
def eagle_prepare_next_token_padded(
    sampled_token_ids: SampledTokens,
    discard_request_mask: Tensor,
    backup_next_token_ids: TokenCounts,
    vocab_size: int,
) -> tuple[TokenCounts, TokenCounts]:
    """Return the token from which each request goes on, and how many tokens were sampled for it."""
    check_next_tokens(
        sampled_token_ids, discard_request_mask, backup_next_token_ids, vocab_size
    )
    width = sampled_token_ids.shape[1]
    # step: select the valid tokens
    is_valid = (sampled_token_ids != -1) & (sampled_token_ids < vocab_size)
    is_valid &= ~discard_request_mask[:, None]
    number = is_valid.sum(1, dtype=torch.int32)
    if not width:
        return backup_next_token_ids.clone(), number
    # step: take the last one, or the backup
    index = torch.arange(width, device=sampled_token_ids.device)
    last = torch.where(is_valid, index, 0).amax(1, keepdim=True)
    token = sampled_token_ids.gather(1, last)[:, 0]
    return torch.where(number > 0, token, backup_next_token_ids), number


@typed
def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: TokenCounts,
    valid_sampled_tokens_count: TokenCounts,
    query_start_loc: StartLoc,
) -> tuple[TokenCounts, TokenCounts]:
    """Return the row of each request's last valid token, and how many drafts were rejected."""
    check_draft_inputs(cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc)
    # step: count the rejected drafts
    drafts = cu_num_draft_tokens.clone()
    drafts[1:] -= cu_num_draft_tokens[:-1]
    rejected = torch.where(drafts > 0, drafts + 1 - valid_sampled_tokens_count, 0)
    # step: go back from the request's last row
    return query_start_loc[1:] - 1 - rejected, rejected


@typed
def eagle_step_update_slot_mapping_and_metadata(
    positions_1d: Positions,
    block_table_tensor: BlockTable,
    seq_lens: TokenCounts,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: StepPositions,
    out_slot_mapping: SlotMapping,
    input_batch_size: int | None = None,
) -> None:
    """Move each request on by one position: its position, its slot and its length."""
    check_eagle_step(
        positions_1d,
        block_table_tensor,
        seq_lens,
        block_size,
        max_model_len,
        out_clamped_positions,
        out_slot_mapping,
        input_batch_size,
        contents=values_checked(seq_lens),
    )
    reqs = positions_1d.shape[0]
    rows = reqs if input_batch_size is None else input_batch_size
    out_slot_mapping[reqs:rows] = PAD_SLOT_ID
    if not reqs:
        return
    # step: take the next position, or start again
    is_past = positions_1d + 1 >= max_model_len
    position = torch.where(is_past, 0, positions_1d + 1)
    # step: look its slot up
    entry = (position // block_size).clamp(max=block_table_tensor.shape[1] - 1)
    block = block_table_tensor.gather(1, entry[:, None])[:, 0].long()
    slot = block * block_size + position % block_size
    # step: count its key
    lens = torch.where(is_past, 1, seq_lens + 1).clamp(max=max_model_len)
    out_clamped_positions[:reqs] = position
    out_slot_mapping[:reqs] = torch.where(is_past, PAD_SLOT_ID, slot)
    seq_lens.copy_(lens)


@typed
def compute_token_to_req_indices(
    query_start_loc: StartLoc, num_mapped_tokens: int, num_tokens: int
) -> TokenCounts:
    """Return the request of each token, by start locations on the device."""
    check_token_to_req(
        query_start_loc,
        num_mapped_tokens,
        num_tokens,
        contents=values_checked(query_start_loc),
    )
    token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    # step: find the first request that ends after the token
    req = torch.searchsorted(query_start_loc[1:], token, right=True, out_int32=True)
    req = req.clamp(max=query_start_loc.shape[0] - 2)
    return torch.where(token < num_mapped_tokens, req, 0)
