import torch
from torch import Tensor


def gather(
    key_cache: Tensor, value_cache: Tensor, block_row: Tensor, seq_len: int
) -> tuple[Tensor, Tensor]:
    block_size = key_cache.shape[1]
    positions = torch.arange(seq_len)
    block_ids = block_row[positions // block_size].long()
    offsets = positions % block_size
    return key_cache[block_ids, offsets], value_cache[block_ids, offsets]
