"""Validation of steps of a draft model."""

import torch
from torch import Tensor

from .batch import LARGEST_ID, check_start_loc
from .memory import check_own_memory
from .primitives import (
    check_dtype,
    check_length,
    check_not_negative,
    check_positive,
    check_same_device,
)


def check_next_tokens(
    sampled_token_ids: Tensor,
    discard_request_mask: Tensor,
    backup_next_token_ids: Tensor,
    vocab_size: int,
) -> None:
    """Raise an error for tensors of other requests, and a vocabulary without tokens."""
    check_positive(vocab_size=vocab_size)
    if sampled_token_ids.dim() != 2:
        raise ValueError(
            f"sampled_token_ids has shape {list(sampled_token_ids.shape)}: expected"
            " [reqs, tokens]"
        )
    check_dtype("discard_request_mask", discard_request_mask, torch.bool)
    reqs = sampled_token_ids.shape[0]
    given = {
        "discard_request_mask": discard_request_mask,
        "backup_next_token_ids": backup_next_token_ids,
    }
    for name, tensor in given.items():
        check_length(name, tensor, reqs, "requests")
    check_same_device(sampled_token_ids=sampled_token_ids, **given)


def check_draft_inputs(
    cu_num_draft_tokens: Tensor,
    valid_sampled_tokens_count: Tensor,
    query_start_loc: Tensor,
) -> None:
    """Raise an error for tensors of other requests."""
    reqs = len(cu_num_draft_tokens)
    check_length("query_start_loc", query_start_loc, reqs + 1, "requests + 1")
    check_length(
        "valid_sampled_tokens_count", valid_sampled_tokens_count, reqs, "requests"
    )
    check_same_device(
        cu_num_draft_tokens=cu_num_draft_tokens,
        valid_sampled_tokens_count=valid_sampled_tokens_count,
        query_start_loc=query_start_loc,
    )


def check_eagle_step(
    positions_1d: Tensor,
    block_table_tensor: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: Tensor,
    out_slot_mapping: Tensor,
    input_batch_size: int | None,
    contents: bool = True,
) -> None:
    """Raise an error for tensors of other requests, and positions past the end of their rows."""
    check_positive(block_size=block_size, max_model_len=max_model_len)
    for name, tensor, dtype in (
        ("positions_1d", positions_1d, torch.int64),
        ("block_table_tensor", block_table_tensor, torch.int32),
        ("seq_lens", seq_lens, torch.int32),
        ("out_clamped_positions", out_clamped_positions, torch.int64),
        ("out_slot_mapping", out_slot_mapping, torch.int64),
    ):
        check_dtype(name, tensor, dtype)
    reqs = len(positions_1d)
    rows = reqs if input_batch_size is None else input_batch_size
    check_length("seq_lens", seq_lens, reqs, "requests")
    shape = list(block_table_tensor.shape)
    if len(shape) != 2 or shape[0] != reqs or (reqs and not shape[1]):
        raise ValueError(
            f"block_table_tensor has shape {shape}: expected [{reqs}, max_blocks] with at"
            " least one block"
        )
    if rows < reqs:
        raise ValueError(
            f"input_batch_size = {rows}: expected at least {reqs}, the requests"
        )
    for name, tensor, least in (
        ("out_clamped_positions", out_clamped_positions, reqs),
        ("out_slot_mapping", out_slot_mapping, rows),
    ):
        if tensor.dim() != 1 or tensor.shape[0] < least:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected at least [{least}]"
            )
    check_same_device(
        positions_1d=positions_1d,
        block_table_tensor=block_table_tensor,
        seq_lens=seq_lens,
        out_clamped_positions=out_clamped_positions,
        out_slot_mapping=out_slot_mapping,
    )
    check_own_memory(
        seq_lens=seq_lens,
        out_clamped_positions=out_clamped_positions,
        out_slot_mapping=out_slot_mapping,
    )
    if not contents:
        return
    reach = block_table_tensor.shape[1] * block_size
    for req, position in enumerate(positions_1d.tolist()):
        new = position + 1
        if position < 0 or (new < max_model_len and new >= reach):
            raise IndexError(
                f"positions_1d[{req}] = {position}: expected 0 <= position <"
                f" {reach - 1}, so that the row of the block table has the next one"
            )


def check_token_to_req(
    query_start_loc: Tensor,
    num_mapped_tokens: int,
    num_tokens: int,
    contents: bool = True,
) -> None:
    """Raise an error for negative numbers, a step without requests, and wrong starts."""
    check_not_negative(num_mapped_tokens=num_mapped_tokens, num_tokens=num_tokens)
    reqs = query_start_loc.shape[0] - 1
    if reqs < 1:
        raise ValueError(
            f"query_start_loc has shape {list(query_start_loc.shape)}: expected"
            " [reqs + 1] with at least one request"
        )
    # the host knows an upper bound only: what the starts add up to is not compared with it
    check_start_loc("query_start_loc", query_start_loc, reqs, LARGEST_ID, contents)
