import torch
from torch import Tensor


def slot_mapping(
    block_table: list[int],
    context_len: int,
    seq_len: int,
    start_idx: int,
    block_size: int,
) -> Tensor:
    slots = []
    for position in range(context_len, seq_len):
        if position < start_idx:
            slots.append(-1)
            continue
        block_id = block_table[position // block_size]
        slots.append(block_id * block_size + position % block_size)
    return torch.tensor(slots, dtype=torch.int64)
