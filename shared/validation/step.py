"""Validation of steps: batch order, micro-batches, groups and buffers."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..contract.integers import LARGEST, as_array, as_int, as_ints, as_list
from ..contract.metadata_classes import CommonAttentionMetadata, UBatchSlice
from .batch import Counts, check_batch_lengths, check_sequences_fit
from .primitives import (
    check_dtype,
    check_length,
    check_not_negative,
    check_on_host,
    check_positive,
)


def check_regions(
    num_scheduled_tokens: Sequence[int],
    decode_threshold: int,
    num_computed_tokens: Sequence[int] | None,
    num_prompt_tokens: Sequence[int] | None,
) -> None:
    """Raise an error for counts of different lengths, or prompts without computed tokens."""
    check_not_negative(decode_threshold=decode_threshold)
    if num_prompt_tokens is not None and num_computed_tokens is None:
        raise ValueError(
            "num_computed_tokens = None: expected one count per request, as num_prompt_tokens is"
            " given; a prompt is done when that many tokens are computed"
        )
    for name, counts in (
        ("num_computed_tokens", num_computed_tokens),
        ("num_prompt_tokens", num_prompt_tokens),
    ):
        if counts is not None and len(counts) != len(num_scheduled_tokens):
            raise ValueError(
                f"{name} has {len(counts)} entries: expected {len(num_scheduled_tokens)}, one"
                " per request"
            )


def check_decode_split(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int,
    treat_short_extends_as_decodes: bool,
) -> Tensor | None:
    """Return the flags of requests within their prompt, or None if they are not needed."""
    check_not_negative(decode_threshold=decode_threshold)
    if treat_short_extends_as_decodes:
        return None
    is_prefilling = common_attn_metadata.is_prefilling
    if is_prefilling is None:
        raise ValueError(
            "is_prefilling = None: expected one bool per request, as short extends shall not"
            " count as decodes; set it, or leave treat_short_extends_as_decodes on"
        )
    num_reqs = len(common_attn_metadata.query_start_loc_cpu) - 1
    check_length("is_prefilling", is_prefilling, num_reqs, "requests")
    return is_prefilling


def check_prefill_chunks(seq_lens: Counts, workspace_size: int) -> None:
    """Raise an error for a workspace that is smaller than the longest sequence."""
    check_positive(workspace_size=workspace_size)
    for req, seq_len in enumerate(seq_lens):
        if not 0 <= seq_len <= workspace_size:
            raise ValueError(
                f"seq_lens[{req}] = {seq_len}: expected 0 to workspace_size ="
                f" {workspace_size}; a sequence is never split, so make the workspace larger"
            )


def check_request_slice(starts: Tensor, request_slice: slice) -> None:
    """Raise an error for a slice without start or stop, or outside the requests."""
    first, last = request_slice.start, request_slice.stop
    if request_slice.step not in (None, 1) or first is None or last is None:
        raise ValueError(
            f"request_slice = {request_slice}: expected slice(start, stop), both given"
        )
    if not 0 <= first <= last or first >= len(starts):
        raise ValueError(
            f"request_slice = {request_slice}: expected 0 <= start <= stop and a start of at"
            f" most {len(starts) - 1}, the number of requests"
        )


def check_micro_batch(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata
) -> None:
    """Raise an error for tokens of other requests, and for a cut that cannot be made."""
    requests, tokens = ubatch_slice.request_slice, ubatch_slice.token_slice
    starts, num_reqs = attn_metadata.query_start_loc_cpu, attn_metadata.num_reqs
    for name, kept, there in (
        ("request_slice", requests, num_reqs),
        ("token_slice", tokens, attn_metadata.slot_mapping.shape[0]),
    ):
        if kept.start is None or kept.stop is None or kept.step not in (None, 1):
            raise ValueError(
                f"{name} = {kept}: expected slice(start, stop), both given"
            )
        if not 0 <= kept.start < kept.stop <= there:
            raise ValueError(
                f"{name} = {kept}: expected 0 <= start < stop <= {there}, at least one of"
                " what there is"
            )
    begin, end = int(starts[requests.start]), int(starts[requests.start + 1])
    if not begin <= tokens.start < max(end, begin + 1):
        raise ValueError(
            f"token_slice = {tokens} starts outside request {requests.start}: expected a"
            f" start from {begin} to {max(end - 1, begin)}, as request_slice = {requests}"
            " begins with it"
        )
    begin, end = int(starts[requests.stop - 1]), int(starts[requests.stop])
    # an empty request at the end is padding, and so are tokens after the last request
    first = begin + 1 if begin < end else end
    if requests.stop == num_reqs:
        end = attn_metadata.slot_mapping.shape[0]
    if not first <= tokens.stop <= end:
        raise ValueError(
            f"token_slice = {tokens} ends outside request {requests.stop - 1}: expected a"
            f" stop from {first} to {end}, as request_slice = {requests} ends with it"
        )
    # the keys of a sequence that is cut here may be distributed over ranks
    tokens_left_out = int(starts[requests.stop]) - tokens.stop
    local = (attn_metadata.dcp_local_seq_lens, attn_metadata.dcp_local_seq_lens_cpu)
    if tokens_left_out > 0 and any(positions is not None for positions in local):
        raise NotImplementedError(
            f"the micro-batch excludes {tokens_left_out} tokens of its last request, so"
            " that this rank's share of its keys (dcp_local_seq_lens) changes; cut the batch"
            " between requests, or set dcp_local_seq_lens after it is cut"
        )


def check_attn_groups(
    attn_metadata_builders: Sequence[object],
    num_reqs: int,
    num_tokens: int,
    query_start_loc: Tensor,
    query_start_loc_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    num_computed_tokens_cpu: Tensor,
    block_tables: Sequence[Tensor],
    slot_mappings: Sequence[Tensor] | Tensor,
    layer_names: Sequence[object],
    num_tokens_padded: int | None = None,
) -> None:
    """Raise an error for short buffers, and for groups without builder, table or slots."""
    num_groups = len(layer_names)
    check_positive(num_reqs=num_reqs)
    check_not_negative(num_tokens=num_tokens)
    num_slots = num_tokens if num_tokens_padded is None else num_tokens_padded
    if num_slots < num_tokens:
        raise ValueError(
            f"num_tokens_padded = {num_tokens_padded}: expected at least {num_tokens}, the"
            " tokens of the batch"
        )
    for name, buffer in (
        ("query_start_loc", query_start_loc),
        ("query_start_loc_cpu", query_start_loc_cpu),
        ("seq_lens", seq_lens),
        ("seq_lens_cpu", seq_lens_cpu),
        ("num_computed_tokens_cpu", num_computed_tokens_cpu),
    ):
        check_dtype(name, buffer, torch.int32)
        if name.endswith("_cpu"):
            check_on_host(name, buffer)
        expected = num_reqs + name.startswith("query_start_loc")
        if buffer.dim() != 1 or buffer.shape[0] < expected:
            raise ValueError(
                f"{name} has shape {list(buffer.shape)}: expected at least [{expected}], as"
                f" num_reqs = {num_reqs}"
            )
    for name, count in (
        ("attn_metadata_builders", len(attn_metadata_builders)),
        ("block_tables", len(block_tables)),
        ("slot_mappings", len(slot_mappings)),
    ):
        if count < num_groups:
            raise IndexError(
                f"{name} has {count} entries: expected {num_groups}, one for each group of"
                " layers that share a block table"
            )
    for group, (table, slots) in enumerate(
        zip(block_tables, slot_mappings, strict=False)
    ):
        if table.shape[0] < num_reqs or slots.shape[0] < num_slots:
            raise ValueError(
                f"group {group} has {table.shape[0]} rows and {slots.shape[0]} slots:"
                f" expected at least num_reqs = {num_reqs} and {num_slots}, the tokens"
            )


def check_rows(name: str, rows: Counts, num_rows: int) -> None:
    """Raise an error for a row that the persistent table does not have."""
    found = as_array(name, rows)
    outside = (found < 0) | (found >= num_rows)
    if outside.any():
        place = int(outside.argmax())
        raise IndexError(
            f"{name}[{place}] = {found[place]}: expected 0 <= row < {num_rows}, the rows of"
            " the table"
        )


def check_new_blocks(
    rows: Sequence[int],
    new_blocks: Sequence[Sequence[int]],
    num_blocks: Any,
    max_blocks: int,
) -> None:
    """Raise an error for blocks that do not fit in their row, before any is written."""
    check_rows("rows", rows, len(num_blocks))
    lists = as_list("new_blocks", new_blocks, "lists of block ids")
    if len(rows) != len(lists):
        raise ValueError(
            f"new_blocks has {len(new_blocks)} lists: expected {len(rows)}, one for each of"
            " rows"
        )
    if len(set(rows)) != len(rows):
        raise ValueError(f"rows = {list(rows)}: expected each row once")
    for row, blocks in zip(rows, lists, strict=True):
        as_ints(f"the blocks of row {row}", blocks, -LARGEST - 1, 2**31 - 1)
        held = int(num_blocks[row])
        if held + len(blocks) > max_blocks:
            raise IndexError(
                f"row {row} holds {held} blocks and gets {len(blocks)} more: expected at most"
                f" {max_blocks}, the width of the table"
            )
        if len(blocks) and min(blocks) < 0:
            raise IndexError(
                f"row {row} gets block {min(blocks)}: expected a block id from 0"
            )


def check_buffer_sizes(
    max_num_reqs: int, max_num_tokens: int, max_blocks: int, block_size: int
) -> None:
    """Raise an error for a size below 1, or a number of blocks below 0."""
    check_positive(
        max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens, block_size=block_size
    )
    check_not_negative(max_blocks=max_blocks)


class RowsOfBuffers(Protocol):
    """What `StepBuffers` says about its sizes and its block table."""

    max_num_reqs: int
    max_num_tokens: int
    block_size: int

    @property
    def num_blocks_per_row(self) -> Counts:
        """Number of blocks in each row."""


def check_buffered_step(
    buffers: RowsOfBuffers,
    query_lens: Counts,
    num_computed_tokens: Counts,
    rows: Counts | None,
    num_reqs_padded: int | None,
    num_tokens_padded: int | None,
) -> None:
    """Raise an error for a step that does not fit in the buffers, or in its rows of blocks."""
    lens = as_array("query_lens", query_lens)
    computed = as_array("num_computed_tokens", num_computed_tokens)
    for name, count, padded, room in (
        ("num_reqs", len(lens), num_reqs_padded, buffers.max_num_reqs),
        ("num_tokens", int(lens.sum()), num_tokens_padded, buffers.max_num_tokens),
    ):
        wanted = count if padded is None else as_int(f"{name}_padded", padded)
        if not count <= wanted <= room:
            raise ValueError(
                f"{name}_padded = {wanted} for {count}: expected {count} to {room}, the room"
                f" of the buffers (max_{name})"
            )
    held = np.asarray(buffers.num_blocks_per_row, dtype=np.int64)
    if rows is None:
        held = held[: len(lens)]
    else:
        check_rows("rows", rows, buffers.max_num_reqs)
        held = held[np.asarray(rows, dtype=np.int64)]
    if len(lens) == len(computed) == len(held):
        # the sign bit of either is set in the bitwise or
        negative = (lens | computed) < 0
        too_long = lens + computed > held * buffers.block_size
        if not (negative | too_long).any():
            return
    # slower: finds the request and raises the error
    check_batch_lengths(lens, computed)
    check_sequences_fit(lens, computed, held, buffers.block_size)
