"""Validation of the slots of a step: states of groups, windows and rings."""

from collections import Counter

import torch
from torch import Tensor

from ..contract.argument_kinds import INT32
from ..contract.step_positions import step_positions
from .batch import check_block_ids, check_block_table, check_start_loc
from .primitives import (
    check_dtype,
    check_length,
    check_not_negative,
    check_positive,
    check_same_device,
)
from .sparse import check_read_ids
from .step_shapes import check_rank_lens, check_ranks


def check_step(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    contents: bool,
    **others: Tensor | None,
) -> None:
    """Raise an error for start locations, lengths and rows that are not of one step.

    Args:
        others: More tensors that have to be on the device of the block table, by name.
    """
    check_block_table(block_table)
    reqs = block_table.shape[0]
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_length("seq_lens", seq_lens, reqs, "rows of the block table")
    check_same_device(
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        **others,
    )
    check_start_loc("query_start_loc", query_start_loc, reqs, num_tokens, contents)
    if contents:
        check_rank_lens(seq_lens)


def check_whole_groups(
    compress_ratio: int,
    dcp_world_size: int,
    dcp_rank: int | None,
    dcp_kv_cache_interleave_size: int,
) -> None:
    """Raise an error for groups of tokens that several ranks share."""
    size = dcp_kv_cache_interleave_size
    check_positive(compress_ratio=compress_ratio)
    check_ranks(dcp_world_size, dcp_rank, size)
    if dcp_world_size > 1 and size % compress_ratio:
        raise ValueError(
            f"dcp_kv_cache_interleave_size = {size}: expected a multiple of compress_ratio ="
            f" {compress_ratio}, so that a rank stores all tokens of a group"
        )


def check_compressed_slots(
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int,
    dcp_kv_cache_interleave_size: int,
    contents: bool,
) -> None:
    """Raise an error for groups that several ranks share, and for states without a block."""
    check_positive(block_size=block_size)
    size = dcp_kv_cache_interleave_size
    check_whole_groups(compress_ratio, dcp_world_size, None, size)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    if slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping has shape {list(slot_mapping.shape)}: expected [tokens]"
        )
    tokens = slot_mapping.shape[0]
    check_step(
        query_start_loc, seq_lens, block_table, tokens, contents, slot_mapping=slot_mapping
    )  # fmt: skip
    if not contents:
        return
    req, position = step_positions(query_start_loc, seq_lens, tokens)
    local = position // (size * dcp_world_size) * size + position % size
    is_read = (
        (slot_mapping >= 0) & (position >= 0) & ((local + 1) % compress_ratio == 0)
    )
    owner, entry = req[is_read], local[is_read] // compress_ratio // block_size
    max_blocks = block_table.shape[1]
    if bool((entry >= max_blocks).any()):
        first = int((entry >= max_blocks).nonzero()[0])
        raise IndexError(
            f"block_table has {max_blocks} entries per request: expected at least"
            f" {int(entry[first]) + 1}, where request {int(owner[first])} stores a state"
        )
    check_read_ids(block_table, owner, entry, block_size)


def check_swa_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    is_valid_token: Tensor,
    block_table: Tensor,
    block_size: int,
    window_size: int,
    index_width: int,
    causal: bool,
    query_ranges: Tensor | None,
    max_image_tokens: int,
    replay_start: Tensor | None,
    contents: bool,
) -> None:
    """Raise an error for rows that are too short for a window, and for sequences without blocks."""
    check_positive(
        block_size=block_size, window_size=window_size, index_width=index_width
    )
    check_not_negative(max_image_tokens=max_image_tokens)
    check_dtype("is_valid_token", is_valid_token, torch.bool)
    if is_valid_token.dim() != 1:
        raise ValueError(
            f"is_valid_token has shape {list(is_valid_token.shape)}: expected [tokens]"
        )
    tokens, most = is_valid_token.shape[0], window_size
    if (query_ranges is None) != (max_image_tokens == 0):
        given = "are given" if query_ranges is not None else "are None"
        raise ValueError(
            f"query_ranges {given} and max_image_tokens = {max_image_tokens}: expected ranges"
            " together with a number above 0, or neither"
        )
    if query_ranges is not None:
        check_dtype("query_ranges", query_ranges, torch.int32)
        if list(query_ranges.shape) != [tokens, 2]:
            raise ValueError(
                f"query_ranges has shape {list(query_ranges.shape)}: expected"
                f" {[tokens, 2]}, first and last position per token"
            )
        most = max(window_size, max_image_tokens) + max_image_tokens
    if replay_start is not None:
        check_dtype("replay_start", replay_start, torch.int32)
        check_length("replay_start", replay_start, seq_lens.shape[0], "requests")
    check_step(
        query_start_loc, seq_lens, block_table, tokens, contents,
        is_valid_token=is_valid_token, query_ranges=query_ranges,
        replay_start=replay_start,
    )  # fmt: skip
    if contents and not causal and query_start_loc.shape[0] > 1:
        visible = max(window_size, max_image_tokens) + int(query_start_loc.diff().max())
        most = max(most, visible)
    if index_width < most:
        raise ValueError(
            f"index_width = {index_width}: expected at least {most}, the keys of a token"
        )
    if contents:
        check_block_ids(block_table, seq_lens, block_size, INT32 // block_size)


def check_tail_slots(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    kpool: int,
    num_tokens: int,
    contents: bool,
) -> None:
    """Raise an error for requests without a ring of their own."""
    check_positive(kpool=kpool)
    check_not_negative(num_tokens=num_tokens)
    check_step(query_start_loc, seq_lens, block_table, num_tokens, contents)
    if not block_table.shape[1]:
        raise ValueError(
            "block_table has no column: expected the block of each request's ring in column 0"
        )
    if not contents:
        return
    has_tokens = query_start_loc.diff() > 0
    owner = has_tokens.nonzero()[:, 0]
    check_read_ids(block_table, owner, torch.zeros_like(owner), kpool)
    named = Counter(block_table[owner, 0].tolist())
    for block_id, reqs in named.items():
        if block_id and reqs > 1:
            raise ValueError(
                f"block_table names block {block_id} in column 0 of {reqs} requests: expected a"
                " ring of its own for each request"
            )
