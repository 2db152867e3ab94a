"""Slot mapping: the cache slot of every new token.

On the host, numpy computes the slots of the whole batch at once, and reads only the entries of the
rows that hold new tokens. On the device, one program computes 256 tokens. Each program finds the
requests of its tokens by bisection in the start locations. Addresses are 64-bit.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import triton
import triton.language as tl

from ...contract.argument_types import typed
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.shapes import BlockTable, SlotMapping, StartLoc, TokenCounts
from ...reference.cache.slot_mapping import (
    compute_slot_mapping_start_idx as compute_slot_mapping_start_idx,
)
from ...validation import (
    LARGEST_ID,
    check_batch,
    check_batch_sizes,
    check_one_sequence,
    check_slot_mapping_device,
    values_checked,
)
from ..kernels.find_request import find_request
from ..runtime.launcher import check_launch
from ..runtime.operators import operator

TOKENS_PER_PROGRAM = 256


@typed
def compute_slot_mapping(
    is_profile_run: bool,
    seq_len: int,
    context_len: int,
    start_idx: int,
    block_size: int,
    block_table: Sequence[int] | None,
) -> SlotMapping:
    """Return the cache slot of every new token of one sequence."""
    check_one_sequence(
        is_profile_run, seq_len, context_len, block_size, block_table, start_idx
    )
    if is_profile_run or block_table is None:
        return torch.full((seq_len,), PAD_SLOT_ID, dtype=torch.int64, device=HOST)
    slots = np.full(seq_len - context_len, PAD_SLOT_ID, dtype=np.int64)
    position = np.arange(max(context_len, start_idx), seq_len)
    row = np.asarray(block_table[: -(-seq_len // block_size)], dtype=np.int64)
    # step: look up the block
    block_id = row[position // block_size]
    # step: add the offset in the block
    slots[len(slots) - len(position) :] = block_id * block_size + position % block_size
    return torch.from_numpy(slots)


@typed
def compute_slot_mapping_batch(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    block_size: int,
) -> SlotMapping:
    """Return the cache slot of every new token of a batch, computed on the host."""
    lens = np.asarray(query_lens, dtype=np.int64)
    computed = np.asarray(num_computed_tokens, dtype=np.int64)
    check_batch_sizes(lens, computed, block_rows, block_size)
    # the entries with new tokens of all rows, concatenated; entry i of a row has index
    # `shift` + i
    first = computed // block_size
    end = -(-(computed + lens) // block_size)
    batch = zip(block_rows, first.tolist(), end.tolist(), strict=True)
    touched = [row[start:stop] for row, start, stop in batch]
    counts = end - first
    shift = counts.cumsum() - counts - first
    try:
        ids = chain.from_iterable(touched)
        block_ids = np.fromiter(ids, np.int64, int(counts.sum()))
        are_ids = (
            0 <= block_ids.min(initial=0) <= block_ids.max(initial=0) <= LARGEST_ID
        )
    except OverflowError:
        are_ids = False
    if not are_ids:
        # it finds the entry: in Python's integers, as an id may have more than 64 bits
        check_batch(query_lens, num_computed_tokens, block_rows, block_size)
    position = np.arange(int(lens.sum()))
    position += (computed - lens.cumsum() + lens).repeat(lens)
    entry = position // block_size
    block_id = block_ids[entry + shift.repeat(lens)]
    return torch.from_numpy(block_id * block_size + position - entry * block_size)


@operator(sizes={"slots": "num_tokens"})
def compute_slot_mapping_device(
    query_start_loc: StartLoc,
    num_computed_tokens: TokenCounts,
    block_table: BlockTable,
    block_size: int,
    num_tokens: int,
) -> SlotMapping:
    """Return the cache slot of every new token of a batch, computed on the block table's device."""
    check_slot_mapping_device(
        query_start_loc,
        num_computed_tokens,
        block_table,
        block_size,
        num_tokens,
        contents=values_checked(block_table),
    )
    check_launch(block_table)
    slot_mapping = block_table.new_empty(num_tokens, dtype=torch.int64)
    num_reqs = block_table.shape[0]
    grid = (triton.cdiv(num_tokens, TOKENS_PER_PROGRAM),)
    if num_tokens:
        _slot_mapping_kernel[grid](
            query_start_loc.contiguous(),
            num_computed_tokens.contiguous(),
            block_table,
            slot_mapping,
            num_tokens,
            num_reqs,
            num_reqs.bit_length(),
            block_size,
            block_table.stride(0),
            block_table.stride(1),
            PAD=PAD_SLOT_ID,
            TOKENS=TOKENS_PER_PROGRAM,
        )
    return slot_mapping


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "num_halvings", "table_stride_req"]
)
def _slot_mapping_kernel(
    query_start_loc,
    num_computed_tokens,
    block_table,
    slot_mapping,
    num_tokens,
    num_reqs,
    num_halvings,
    block_size,
    table_stride_req,
    table_stride_entry,
    PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    req = find_request(query_start_loc, token, num_reqs, num_halvings)
    owned = (token < num_tokens) & (req < num_reqs)
    start = tl.load(query_start_loc + req, mask=owned, other=0)
    computed = tl.load(num_computed_tokens + req, mask=owned, other=0)
    position = computed + token - start
    # step: look up the block
    row = block_table + req.to(tl.int64) * table_stride_req
    entry = (position // block_size).to(tl.int64) * table_stride_entry
    block_id = tl.load(row + entry, mask=owned, other=0)
    # step: add the offset in the block
    # 64-bit: block_id * block_size passes 2**31 at two billion slots
    slot = block_id.to(tl.int64) * block_size + position % block_size
    slot = tl.where(owned, slot, PAD)
    tl.store(slot_mapping + token, slot, mask=token < num_tokens)
