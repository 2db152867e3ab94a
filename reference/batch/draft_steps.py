"""Steps of a draft model: lengths, slots and tokens that the host does not know.

A draft model proposes tokens one after the other, and the large model verifies them in one step.
How many are accepted is known on the device alone. The next steps are planned there, from what was
sampled, without waiting: each request keeps the number of new tokens that the host knows, and the
rejected ones are padding at its end.

1. `eagle_prepare_next_token_padded` finds each request's last valid token, from which the draft
   model goes on.
2. `eagle_prepare_inputs_padded` finds the row of that token, before the rejected ones.
3. `eagle_step_update_slot_mapping_and_metadata` moves each request on by one position, for each
   further draft.
4. `compute_token_to_req_indices` says whose tokens the rows are, where requests differ from those
   that the host knows.

Source: vLLM's `v1/spec_decode/utils.py` (0.33).
"""

import torch
from torch import Tensor

from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.shapes import (
    BlockTable,
    Positions,
    SampledTokens,
    SlotMapping,
    StartLoc,
    StepPositions,
    TokenCounts,
)
from ...validation import validated
from ...validation.draft_steps import (
    check_draft_inputs,
    check_eagle_step,
    check_next_tokens,
    check_token_to_req,
)


@validated(check_next_tokens)
def eagle_prepare_next_token_padded(
    sampled_token_ids: SampledTokens,
    discard_request_mask: Tensor,
    backup_next_token_ids: TokenCounts,
    vocab_size: int,
) -> tuple[TokenCounts, TokenCounts]:
    """Return the token from which each request goes on, and how many tokens were sampled for it.

    Args:
        sampled_token_ids: [reqs, tokens] int32, accepted drafts and the token after them. Rejected
            ones are -1.
        discard_request_mask: [reqs] bool, requests whose tokens do not count, such as chunks of a
            prompt.
        backup_next_token_ids: [reqs] int32, the tokens of requests without a valid one.
        vocab_size: tokens from this number on are not valid.

    Returns:
        [reqs] int32 last valid token, and [reqs] int32 number of valid tokens.

    Raises:
        ValueError: lengths that differ, or several devices.

    Source:
        vLLM's kernel of that name (0.33).

    Example:
        Two tokens were sampled for request 0, and none for request 1.

        >>> tokens, count = eagle_prepare_next_token_padded(
        ...     torch.tensor([[8, 5, -1], [-1, -1, -1]], dtype=torch.int32),
        ...     torch.tensor([False, False]),
        ...     torch.tensor([1, 2], dtype=torch.int32),
        ...     vocab_size=100,
        ... )
        >>> tokens.tolist(), count.tolist()
        ([5, 2], [2, 0])
    """
    tokens, number = backup_next_token_ids.tolist(), []
    for req, row in enumerate(sampled_token_ids.tolist()):
        # step: select the valid tokens
        is_taken = not bool(discard_request_mask[req])
        valid = [token for token in row if token != -1 and token < vocab_size]
        valid = valid if is_taken else []
        # step: take the last one, or the backup
        tokens[req] = valid[-1] if valid else tokens[req]
        number.append(len(valid))
    device = sampled_token_ids.device
    return _int32(tokens, device), _int32(number, device)


@validated(check_draft_inputs)
def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: TokenCounts,
    valid_sampled_tokens_count: TokenCounts,
    query_start_loc: StartLoc,
) -> tuple[TokenCounts, TokenCounts]:
    """Return the row of each request's last valid token, and how many drafts were rejected.

    Args:
        cu_num_draft_tokens: [reqs] int32 drafts of the requests up to each of them, added up.
        valid_sampled_tokens_count: [reqs] int32 tokens that were sampled: accepted drafts and one.
        query_start_loc: [reqs + 1] start of each request's new tokens.

    Returns:
        [reqs] int32 rows, and [reqs] int32 rejected drafts. A request without drafts has none.

    Raises:
        ValueError: lengths that differ, or several devices.

    Source:
        vLLM's kernel of that name (0.33).

    Example:
        Three drafts each. All of request 0 were accepted, and none of request 1.

        >>> rows, rejected = eagle_prepare_inputs_padded(
        ...     torch.tensor([3, 6], dtype=torch.int32),
        ...     torch.tensor([4, 1], dtype=torch.int32),
        ...     torch.tensor([0, 4, 8], dtype=torch.int32),
        ... )
        >>> rows.tolist(), rejected.tolist()
        ([3, 4], [0, 3])
    """
    ends, valid = query_start_loc.tolist()[1:], valid_sampled_tokens_count.tolist()
    rows, rejected, before = [], [], 0
    for req, total in enumerate(cu_num_draft_tokens.tolist()):
        # step: count the rejected drafts
        drafts, before = total - before, total
        rejected.append(drafts + 1 - valid[req] if drafts > 0 else 0)
        # step: go back from the request's last row
        rows.append(ends[req] - 1 - rejected[req])
    device = query_start_loc.device
    return _int32(rows, device), _int32(rejected, device)


@validated(check_eagle_step)
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
    """Move each request on by one position: its position, its slot and its length.

    A request at the end of the model's range goes on at position 0 with one key, and stores
    nothing: what it drafts is rejected later.

    Args:
        positions_1d: [reqs] int64 position of each request's token.
        block_table_tensor: [reqs, max_blocks].
        seq_lens: [reqs] int32 keys of each request, modified in place.
        block_size: slots in a block.
        max_model_len: positions that the model has.
        out_clamped_positions: [reqs or more] int64, modified in place. May be `positions_1d`.
        out_slot_mapping: [slots] int64, modified in place, at least `input_batch_size`.
        input_batch_size: Optional. Rows of a padded batch; those after the requests get
            PAD_SLOT_ID. If None, as many as requests.

    Raises:
        ValueError: lengths that differ, several devices, or a number below 1.
        IndexError: a position past the end of its row.

    Source:
        vLLM's function of that name (0.33).

    Example:
        Position 5 is the second of block 2, and the model has no position 16.

        >>> lens = torch.tensor([5, 16], dtype=torch.int32)
        >>> positions, slots = torch.zeros(2, dtype=torch.int64), torch.zeros(3).long()
        >>> eagle_step_update_slot_mapping_and_metadata(
        ...     torch.tensor([4, 15]),
        ...     torch.tensor([[7, 2], [5, 3]], dtype=torch.int32),
        ...     lens,
        ...     block_size=4,
        ...     max_model_len=16,
        ...     out_clamped_positions=positions,
        ...     out_slot_mapping=slots,
        ...     input_batch_size=3,
        ... )
        >>> positions.tolist(), slots.tolist(), lens.tolist()
        ([5, 0], [9, -1, -1], [6, 1])
    """
    reqs = len(positions_1d)
    slots = torch.full((input_batch_size or reqs,), PAD_SLOT_ID, device=HOST)
    found, lens = [], []
    for req, position in enumerate(positions_1d.tolist()):
        # step: take the next position, or start again
        is_past = position + 1 >= max_model_len
        found.append(0 if is_past else position + 1)
        # step: look its slot up
        if not is_past:
            block, offset = divmod(position + 1, block_size)
            slots[req] = int(block_table_tensor[req, block]) * block_size + offset
        # step: count its key
        length = 1 if is_past else int(seq_lens[req]) + 1
        lens.append(min(length, max_model_len))
    out_clamped_positions[:reqs] = torch.tensor(found, dtype=torch.int64, device=HOST)
    out_slot_mapping[: len(slots)] = slots
    seq_lens.copy_(_int32(lens, HOST))


@validated(check_token_to_req)
def compute_token_to_req_indices(
    query_start_loc: StartLoc, num_mapped_tokens: int, num_tokens: int
) -> TokenCounts:
    """Return the request of each token, by start locations on the device.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        num_mapped_tokens: tokens of all requests, as the host knows it.
        num_tokens: rows of the step. Those from `num_mapped_tokens` on get request 0.

    Returns:
        [num_tokens] int32. Tokens past the last request get the last one.

    Raises:
        ValueError: a negative number, a step without requests, or starts that decrease or do
            not begin at 0.

    Source:
        vLLM's function of that name (0.33), which writes into a buffer.

    Example:
        Request 0 has no token, and row 3 is padding.

        >>> compute_token_to_req_indices(
        ...     torch.tensor([0, 0, 2, 3], dtype=torch.int32), 3, 4
        ... ).tolist()
        [1, 1, 2, 0]
    """
    ends = query_start_loc.tolist()[1:]
    found = []
    for token in range(num_tokens):
        # step: find the first request that ends after the token
        after = [req for req, end in enumerate(ends) if token < end]
        req = after[0] if after else len(ends) - 1
        found.append(req if token < num_mapped_tokens else 0)
    return _int32(found, query_start_loc.device)


def _int32(numbers: list[int], device: torch.device) -> Tensor:
    """Return numbers as a tensor."""
    return torch.tensor(numbers, dtype=torch.int32, device=HOST).to(device)
