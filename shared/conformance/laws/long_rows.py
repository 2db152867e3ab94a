"""Laws of rows of long contexts: no block past a fixed number is lost.

A row of 131,072 tokens in blocks of 16 has 8,192 ids. Buffers and shortcuts for short rows end
earlier, and so do integers of 16 bits. The ids of a row are not in order, and the last is used.
"""

import torch

from ..candidates.setting import Setting
from ..checks.expect import expect_same
from .law import law

LENGTHS = [65, 1025, 8193, 33000]
"""Blocks of a row: past a shortcut for short rows, 10 bits, a long context, and 15 bits."""


def _row(num_blocks: int) -> list[int]:
    """Return distinct block ids that are not in order."""
    return [(7919 * index + 3) % 65537 for index in range(num_blocks)]


@law("make_block_table", "append_blocks", cases=LENGTHS)
def a_table_holds_all_blocks_of_a_long_context(
    setting: Setting, num_blocks: int
) -> None:
    """The other rows are short, so that all rows together take few ids per row."""
    row = _row(num_blocks)
    for others in (0, 1, 32):
        rows = [[5], *[[9]] * others, row]
        table = setting.candidate.make_block_table(rows, device=setting.device)
        right = torch.zeros(len(rows), num_blocks, dtype=torch.int32)
        right[0, 0] = 5
        right[1:-1, 0] = 9
        right[-1] = torch.tensor(row)
        expect_same("block table", table.cpu(), right)
    # the row grows from its first half to its whole length
    half = num_blocks // 2
    table = torch.zeros(2, num_blocks, dtype=torch.int32, device=setting.device)
    held = torch.tensor([1, half], dtype=torch.int32)
    counts = setting.candidate.append_blocks(table, held, [[], row[half:]])
    expect_same("block counts", counts.tolist(), [1, num_blocks])
    expect_same("appended blocks", table[1, half:].tolist(), row[half:])


@law("BlockTable", cases=LENGTHS)
def a_persistent_row_holds_all_blocks_of_a_long_context(
    setting: Setting, num_blocks: int
) -> None:
    row = _row(num_blocks)
    table = setting.candidate.BlockTable(2, 2, num_blocks, device=setting.device)
    table.add_row(row[:-1], 1)
    table.append_row(row[-1:], 1)
    found = table.get_device_tensor(2).cpu()
    expect_same("row", found[1].tolist(), row)
    last = 2 * num_blocks - 1
    slots = table.compute_slot_mapping([1, 1], [last, last - 2])
    expect_same("last slots", slots.tolist(), [2 * row[-1] + 1, 2 * row[-2] + 1])


@law("StepBuffers", cases=LENGTHS)
def buffers_hold_all_blocks_of_a_long_context(
    setting: Setting, num_blocks: int
) -> None:
    row = _row(num_blocks)
    buffers = setting.candidate.StepBuffers(2, 4, num_blocks, 2, setting.device)
    buffers.append_blocks([1], [row[:-1]])
    buffers.append_blocks([1], [row[-1:]])
    context = 2 * num_blocks - 2
    step = buffers.build([2], [context], rows=[1])
    expect_same("row", step.block_table_tensor.cpu()[0].tolist(), row)
    expect_same("slots", step.slot_mapping.tolist(), [2 * row[-1], 2 * row[-1] + 1])
    expect_same("seq_lens", step.seq_lens.tolist(), [context + 2])
