"""Triton kernels of the rows that tokens select: slots of positions, and slots as a block table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....contract.kinds import PAD_SLOT_ID
from ...runtime.chip import has_dependent_launches
from ...runtime.launcher import RECORDING, launch_kernel

MOST_ENTRIES = 2048
"""Entries of a row that a program reads at once."""
PAD = tl.constexpr(PAD_SLOT_ID)


@triton.jit
def pack_slots_kernel(
    slots, rows, starts, lens, selected, slots_stride_token, slots_stride_entry, block_size,
    block_step, slot_step, ENTRIES: tl.constexpr, LAUNCHES_DEPENDENTS: tl.constexpr,
):  # fmt: skip
    """Write a token's row of a table of blocks of one: its slots in their order, at the front.

    Args:
        slots: [tokens, selected]; negative entries are left out.
        rows: [tokens, selected], packed. What follows a row's slots is not written.
        starts, lens: [tokens + 1] and [tokens] of a batch with a request per token.
        block_size: slots per block.
        block_step, slot_step: blocks of one from block to block, and from slot to slot.
        LAUNCHES_DEPENDENTS: whether the next launch may begin, which waits for the end of this one.
    """
    if LAUNCHES_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    row = rows + token.to(tl.int64) * selected
    source = slots + token.to(tl.int64) * slots_stride_token
    count = tl.zeros([], tl.int32)
    for begin in range(0, selected, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        places = entry.to(tl.int64) * slots_stride_entry
        slot = tl.load(source + places, mask=entry < selected, other=-1)
        is_slot = (slot >= 0).to(tl.int32)
        place = count + tl.cumsum(is_slot, 0) - 1
        number = slot // block_size * block_step + slot % block_size * slot_step
        tl.store(row + place, number, mask=slot >= 0)
        count += tl.sum(is_slot, 0)
    tl.store(lens + token, count)
    tl.store(starts + token, token)
    tl.store(starts + token + 1, token + 1)


def pack_slots(
    slots: Tensor, block_size: int = 1, block_step: int = 1, slot_step: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots as the rows of a block table, the starts of one-token requests, and lengths.

    Args:
        slots: [tokens, selected] int32; negative entries are left out.
        block_size: slots per block.
        block_step, slot_step: blocks of one from block to block, and from slot to slot. By default
            a row has the slots themselves.
    """
    tokens, selected = slots.shape
    rows = torch.empty_like(slots, memory_format=torch.contiguous_format)
    # kernels read both from a multiple of 16 bytes on
    first_len = -(-(tokens + 1) // 4) * 4
    numbers = slots.new_empty(first_len + tokens)
    if RECORDING.compiles_only:
        # no launch writes them, and they may be validated
        numbers.zero_()
    starts, lens = numbers[: tokens + 1], numbers[first_len:]
    if tokens:
        launch_kernel(
            pack_slots_kernel, (tokens,), slots, rows, starts, lens, selected, *slots.stride(),
            block_size, block_step, slot_step, ENTRIES=entries_of(selected),
            LAUNCHES_DEPENDENTS=has_dependent_launches(slots.device),
        )  # fmt: skip
    else:
        starts.zero_()
    return rows, starts, lens


@triton.jit(do_not_specialize=["reqs", "max_blocks", "table_stride_req"])
def convert_indices_kernel(
    req_id, block_table, positions, slots, counts, reqs, max_blocks, selected, req_stride,
    table_stride_req, table_stride_entry, positions_stride_token, positions_stride_entry,
    block_size, world_size, rank, interleave, COMPACT: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the slots of a token's positions, and how many it has.

    Args:
        req_id: [tokens] row of the block table of each token; negative for padding.
        positions: [tokens, selected]; negative entries are left out.
        slots: [tokens, selected], packed. PAD for what is left out.
        counts: [tokens].
        world_size, rank, interleave: of decode context parallelism.
        COMPACT: whether slots are moved to the front, in their order.
    """
    token = tl.program_id(0).to(tl.int64)
    owner = tl.load(req_id + token * req_stride).to(tl.int64)
    is_owned = (owner >= 0) & (owner < reqs)
    table = block_table + owner * table_stride_req
    source = positions + token * positions_stride_token
    row = slots + token * selected
    count = tl.zeros([], tl.int32)
    for begin in range(0, selected, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        places = entry.to(tl.int64) * positions_stride_entry
        position = tl.load(source + places, mask=entry < selected, other=-1)
        # step: find the rank of the position, and its position there
        turn = position // interleave
        local = turn // world_size * interleave + position % interleave
        # step: skip what has no slot
        has_slot = is_owned & (position >= 0) & (turn % world_size == rank)
        has_slot &= local // block_size < max_blocks
        # step: look up the slot in the request's row
        column = (local // block_size).to(tl.int64) * table_stride_entry
        block_id = tl.load(table + column, mask=has_slot, other=0)
        slot = tl.where(has_slot, block_id * block_size + local % block_size, PAD)
        is_slot = has_slot.to(tl.int32)
        if COMPACT:
            place = count + tl.cumsum(is_slot, 0) - 1
            tl.store(row + place, slot, mask=has_slot)
        else:
            tl.store(row + entry, slot, mask=entry < selected)
        count += tl.sum(is_slot, 0)
    if COMPACT:
        for begin in range(0, selected, ENTRIES):
            entry = begin + tl.arange(0, ENTRIES)
            is_free = (entry >= count) & (entry < selected)
            tl.store(row + entry, tl.full([ENTRIES], PAD, tl.int32), mask=is_free)
    tl.store(counts + token, count)


def convert_indices(
    req_id: Tensor,
    block_table: Tensor,
    positions: Tensor,
    block_size: int,
    ranks: tuple[int, int, int],
    is_compact: bool,
) -> tuple[Tensor, Tensor]:
    """Return the slots of positions, [tokens, selected], and how many each token has.

    Args:
        ranks: world size, rank and interleave size of decode context parallelism.
        is_compact: whether slots are moved to the front, in their order.
    """
    tokens, selected = positions.shape
    slots = torch.empty_like(positions, memory_format=torch.contiguous_format)
    counts = torch.empty_like(req_id, memory_format=torch.contiguous_format)
    if tokens:
        launch_kernel(
            convert_indices_kernel, (tokens,), req_id, block_table, positions, slots, counts,
            *block_table.shape, selected, req_id.stride(0), *block_table.stride(),
            *positions.stride(), block_size, *ranks, COMPACT=is_compact,
            ENTRIES=entries_of(selected),
        )  # fmt: skip
    return slots, counts


def entries_of(selected: int) -> int:
    """Return the entries of a row that a program reads at once."""
    return min(MOST_ENTRIES, max(16, triton.next_power_of_2(selected)))
