"""Validation of block tables, lengths and start locations."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..contract.argument_kinds import INT32
from ..contract.integers import as_array
from ..contract.kinds import HOST
from .primitives import (
    check_dtype,
    check_length,
    check_not_negative,
    check_positive,
    check_same_device,
)

LARGEST_ID = INT32
"""The largest block id that a block table holds."""

Counts: TypeAlias = Sequence[int] | np.ndarray
"""One count per request."""


def check_block_rows(rows: Sequence[Sequence[int]], max_blocks: int) -> None:
    """Raise an error for a row longer than the table's width, and for a negative block id."""
    for req, row in enumerate(rows):
        if len(row) > max_blocks:
            raise IndexError(
                f"rows[{req}] has {len(row)} blocks: expected at most max_blocks ="
                f" {max_blocks}; make the table wider"
            )
        if len(row) and not 0 <= min(row) <= max(row) <= LARGEST_ID:
            entry = next(
                i for i, block_id in enumerate(row) if not 0 <= block_id <= LARGEST_ID
            )
            raise IndexError(
                f"rows[{req}][{entry}] = {row[entry]}: expected a block id from 0"
                f" to {LARGEST_ID}"
            )


def check_append_blocks(
    block_table: Tensor,
    num_blocks: Tensor,
    new_blocks: Sequence[Sequence[int]],
) -> None:
    """Raise an error for blocks that do not fit in their row."""
    check_block_table(block_table)
    reqs, max_blocks = block_table.shape
    check_length("num_blocks", num_blocks, reqs, "rows of the block table")
    if len(new_blocks) != reqs:
        raise ValueError(
            f"new_blocks has {len(new_blocks)} lists: expected {reqs}, one for each row of"
            " the block table (an empty list where nothing is added)"
        )
    check_block_rows(new_blocks, max_blocks)
    if num_blocks.device != HOST:
        raise ValueError(
            f"num_blocks is on {num_blocks.device}: expected cpu, where blocks are"
            " allocated"
        )
    for req, (held, row) in enumerate(
        zip(num_blocks.tolist(), new_blocks, strict=True)
    ):
        if held < 0 or held + len(row) > max_blocks:
            raise IndexError(
                f"row {req} holds {held} blocks and gets {len(row)} more: expected at most"
                f" {max_blocks}, the width of the block table"
            )


def check_block_table(block_table: Tensor) -> None:
    """Raise an error for a table that is not one row of int32 ids per request."""
    check_dtype("block_table", block_table, torch.int32)
    if block_table.dim() != 2:
        raise ValueError(
            f"block_table has shape {list(block_table.shape)}: expected [reqs, max_blocks]"
        )


def check_one_sequence(
    is_profile_run: bool,
    seq_len: int,
    context_len: int,
    block_size: int,
    block_table: Sequence[int] | None,
    start_idx: int = 0,
) -> None:
    """Validate the lengths of a sequence and, except in a profile run, its block table."""
    check_positive(block_size=block_size)
    if not 0 <= context_len <= seq_len:
        raise ValueError(
            f"context_len = {context_len}, seq_len = {seq_len}: expected"
            " 0 <= context_len <= seq_len"
        )
    if is_profile_run:
        return
    if block_table is None:
        raise ValueError(
            "block_table = None: expected a row unless is_profile_run is set"
        )
    check_row_reaches(len(block_table), seq_len, block_size)
    first_position = max(context_len, start_idx)
    check_read_entries("block_table", block_table, first_position, seq_len, block_size)


def check_read_entries(
    name: str, row: Sequence[int], first_position: int, seq_len: int, block_size: int
) -> None:
    """Raise an error if an entry that is read for some positions is not a block id."""
    first, end = first_position // block_size, -(-seq_len // block_size)
    for entry in range(first, end if first_position < seq_len else first):
        if not 0 <= row[entry] <= LARGEST_ID:
            raise IndexError(
                f"{name}[{entry}] = {row[entry]}: expected a block id from 0 to"
                f" {LARGEST_ID}"
            )


def check_row_reaches(row_len: int, seq_len: int, block_size: int) -> None:
    """Raise an error for a sequence that needs more blocks than its row has entries."""
    if seq_len > row_len * block_size:
        raise IndexError(
            f"position {seq_len - 1} needs entry {(seq_len - 1) // block_size} of the block"
            f" table: expected an entry below {row_len}, the length of the row; append a"
            " block first"
        )


def check_batch_lengths(query_lens: Counts, num_computed_tokens: Counts) -> None:
    """Raise an error for lists of different lengths, and for negative counts."""
    if len(query_lens) != len(num_computed_tokens):
        raise ValueError(
            f"query_lens has {len(query_lens)} entries but num_computed_tokens has"
            f" {len(num_computed_tokens)}: expected one of each per request"
        )
    for name, counts in (
        ("query_lens", query_lens),
        ("num_computed_tokens", num_computed_tokens),
    ):
        negative = as_array(name, counts) < 0
        if negative.any():
            req = int(negative.argmax())
            raise ValueError(f"{name}[{req}] = {counts[req]}: expected at least 0")


def check_sequences_fit(
    query_lens: Counts,
    num_computed_tokens: Counts,
    row_lens: Counts,
    block_size: int,
) -> None:
    """Raise an error for a request whose sequence is longer than its row of the block table."""
    if len(row_lens) != len(query_lens):
        raise ValueError(
            f"the block table has {len(row_lens)} rows: expected {len(query_lens)}, one per"
            " request"
        )
    room = np.asarray(row_lens, dtype=np.int64) * block_size
    computed = np.asarray(num_computed_tokens, dtype=np.int64)
    outgrown = computed + np.asarray(query_lens, dtype=np.int64) > room
    if outgrown.any():
        req = int(outgrown.argmax())
        raise IndexError(
            f"request {req} has {num_computed_tokens[req]} + {query_lens[req]} tokens but its"
            f" row of the block table holds {row_lens[req]} blocks of {block_size}: expected"
            f" at most {room[req]} tokens; append a block first"
        )


def check_batch(
    query_lens: Counts,
    num_computed_tokens: Counts,
    block_rows: Sequence[Sequence[int]],
    block_size: int,
) -> None:
    """Raise an error for a sequence longer than its row, or an entry that is not a block id.

    Only the entries that hold new tokens are read.
    """
    check_batch_sizes(query_lens, num_computed_tokens, block_rows, block_size)
    batch = zip(query_lens, num_computed_tokens, block_rows, strict=True)
    for req, (query_len, computed, row) in enumerate(batch):
        name = f"block_rows[{req}]"
        check_read_entries(name, row, computed, computed + query_len, block_size)


def check_batch_sizes(
    query_lens: Counts,
    num_computed_tokens: Counts,
    block_rows: Sequence[Sequence[int]],
    block_size: int,
) -> None:
    """Raise an error for a batch of which a sequence is longer than its row of blocks."""
    check_positive(block_size=block_size)
    check_batch_lengths(query_lens, num_computed_tokens)
    row_lens = np.fromiter(map(len, block_rows), np.int64, len(block_rows))
    check_sequences_fit(query_lens, num_computed_tokens, row_lens, block_size)


def check_start_loc(
    name: str, starts: Tensor, reqs: int, num_tokens: int, contents: bool
) -> None:
    """Raise an error for starts that do not begin at 0, decrease, or end past the last token."""
    check_dtype(name, starts, torch.int32)
    check_length(name, starts, reqs + 1, "requests + 1")
    if not contents:
        return
    values = starts.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] = {values[0]}: expected 0")
    for req in range(reqs):
        if values[req + 1] < values[req]:
            raise ValueError(
                f"{name}[{req + 1}] = {values[req + 1]} is less than {name}[{req}] ="
                f" {values[req]}: expected starts that never decrease"
            )
    if values[-1] > num_tokens:
        raise ValueError(
            f"{name}[{reqs}] = {values[-1]}: expected at most {num_tokens}, the tokens"
            " there are"
        )


def check_slot_mapping_device(
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
    contents: bool,
) -> None:
    """Raise an error for a batch whose slots cannot be computed."""
    check_positive(block_size=block_size)
    check_not_negative(num_tokens=num_tokens)
    check_dtype("num_computed_tokens", num_computed_tokens, torch.int32)
    check_block_table(block_table)
    reqs, max_blocks = block_table.shape
    check_length("num_computed_tokens", num_computed_tokens, reqs, "requests")
    check_same_device(
        block_table=block_table,
        query_start_loc=query_start_loc,
        num_computed_tokens=num_computed_tokens,
    )
    check_start_loc("query_start_loc", query_start_loc, reqs, num_tokens, contents)
    if contents:
        query_lens = query_start_loc.diff().tolist()
        computed = num_computed_tokens.tolist()
        check_batch_lengths(query_lens, computed)
        check_sequences_fit(query_lens, computed, [max_blocks] * reqs, block_size)
        rows = zip(block_table, query_lens, computed, strict=True)
        for req, (row, query_len, first) in enumerate(rows):
            seq_len = first + query_len
            ids = row[: -(-seq_len // block_size)].tolist()
            name = f"block_table[{req}]"
            check_read_entries(name, ids, first, seq_len, block_size)


def check_block_ids(
    block_table: Tensor, seq_lens: Tensor, block_size: int, num_blocks: int
) -> None:
    """Raise an error for a sequence longer than its row, and for an invalid block id in it."""
    max_blocks = block_table.shape[1]
    lens = seq_lens.tolist()
    for req, seq_len in enumerate(lens):
        if not 0 <= seq_len <= max_blocks * block_size:
            raise IndexError(
                f"seq_lens[{req}] = {seq_len}: expected 0 to {max_blocks * block_size},"
                f" what {max_blocks} blocks of {block_size} hold"
            )
    # entries past the end of a sequence are not read
    rows = [
        row[: -(-n // block_size)] for row, n in zip(block_table, lens, strict=True)
    ]
    for req, row in enumerate(rows):
        for entry, block_id in enumerate(row.tolist()):
            if not 0 <= block_id < num_blocks:
                raise IndexError(
                    f"block_table[{req}, {entry}] = {block_id} is outside the cache:"
                    f" expected 0 <= block id < {num_blocks}"
                )
