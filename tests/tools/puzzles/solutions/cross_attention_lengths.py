import torch
from torch import Tensor


def cross_attention_lengths(
    query_lens: Tensor, computed_lens: Tensor, encoder_lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query_start_loc = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    query_start_loc[1:] = query_lens.cumsum(0)
    kv_lens = encoder_lens.clone()
    new_kv_lens = torch.where(computed_lens == 0, encoder_lens, 0)
    num_blocks = (kv_lens + block_size - 1) // block_size
    return query_start_loc, kv_lens, new_kv_lens, num_blocks
