from torch import Tensor


def append_blocks(
    block_table: Tensor, num_blocks: Tensor, new_blocks: list[list[int]]
) -> Tensor:
    counts = num_blocks.clone()
    for row, blocks in enumerate(new_blocks):
        for block_id in blocks:
            block_table[row, counts[row]] = block_id
            counts[row] += 1
    return counts
