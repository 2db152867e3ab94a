"""Laws of more rows than fit 16 bits: block tables and starts of many requests.

The rows are short and nearly equal, so that the expected tensors are made without a loop.
"""

import torch
from torch import Tensor

from ..candidates.setting import Setting
from ..checks.canaries import packed
from ..checks.expect import expect_same
from .law import law

ROWS = 65_600
"""More rows than 16 bits count."""


def rows_of(last: list[int]) -> tuple[list[list[int]], Tensor]:
    """Return rows [7, 70_000], the last of them with other numbers, and their table."""
    rows = [[7, 70_000] for _ in range(ROWS - 1)] + [last]
    right = torch.tensor([7, 70_000, 0], dtype=torch.int32).repeat(ROWS, 1)
    right[-1] = torch.tensor([*last, 0, 0, 0][:3])
    return rows, right


@law("make_block_table", cases=[[9, 65_536, 3]])
def a_table_holds_more_rows_than_fit_16_bits(setting: Setting, last: list[int]) -> None:
    rows, right = rows_of(last)
    found = setting.candidate.make_block_table(rows, device=setting.device)
    expect_same("block table", packed(found), right)


@law("append_blocks", cases=[[70_001]])
def blocks_are_appended_to_rows_past_16_bits(setting: Setting, new: list[int]) -> None:
    _, table = rows_of([5])
    right = table.clone()
    right[-1, 1] = new[0]
    held = torch.full((ROWS,), 2, dtype=torch.int32)
    held[-1] = 1
    blocks: list[list[int]] = [[] for _ in range(ROWS - 1)] + [new]
    table = table.to(setting.device)
    found = setting.candidate.append_blocks(table, held, blocks)
    expect_same("block table", packed(table), right)
    expect_same("blocks per row", packed(found), torch.full_like(held, 2))


@law("BlockTable", cases=[[70_000]])
def persistent_rows_may_pass_16_bits(setting: Setting, blocks: list[int]) -> None:
    """Rows that are the same in 16 bits do not have the same blocks."""
    last, low = ROWS - 1, (ROWS - 1) & 0xFFFF
    table = setting.candidate.BlockTable(4, ROWS, 2, device=setting.device)
    right = torch.zeros(ROWS, 2, dtype=torch.int32)
    table.add_row(blocks, last)
    table.append_row([5], last)
    table.move_row(last, last - 1)
    table.add_row([9], low)
    table.swap_row(low, last)
    right[low] = right[last - 1] = torch.tensor([*blocks, 5])
    right[last, 0] = 9
    expect_same("rows", packed(table.get_device_tensor(ROWS)), right)
    held = torch.tensor([int(table.num_blocks_per_row[row]) for row in (low, last)])
    expect_same("blocks per row", held.tolist(), [2, 1])
    slots = table.compute_slot_mapping([last, low, last - 1], [3, 5, 2])
    right_slots = torch.tensor([9 * 4 + 3, 5 * 4 + 1, blocks[0] * 4 + 2])
    expect_same("slots", packed(slots), right_slots)


@law("mamba_get_block_table_tensor", cases=[3])
def states_of_more_requests_than_fit_16_bits_are_found(
    setting: Setting, size: int
) -> None:
    _, table = rows_of([9, 65_536, 3])
    lens = torch.full((ROWS,), 2 * size, dtype=torch.int32)
    lens[-1] = 3 * size
    found = setting.candidate.mamba_get_block_table_tensor(
        table.to(setting.device), lens.to(setting.device), size, 0, "align"
    )
    right = torch.full((ROWS, 1), 70_000, dtype=torch.int32)
    right[-1] = 3
    expect_same("blocks of the states", packed(found), right)


@law("slice_query_start_locs", cases=[2])
def starts_of_more_requests_than_fit_16_bits_are_sliced(
    setting: Setting, new: int
) -> None:
    starts = torch.arange(0, new * ROWS + 1, new, dtype=torch.int32)
    given = starts.to(setting.device)
    found = setting.candidate.slice_query_start_locs(given, slice(ROWS - 300, ROWS))
    expect_same("starts", packed(found), starts[:301])
