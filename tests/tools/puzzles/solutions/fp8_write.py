import torch
from torch import Tensor


def fp8_write(
    key: Tensor, key_cache: Tensor, slot_mapping: Tensor, scale: Tensor
) -> None:
    block_size = key_cache.shape[1]
    largest = torch.finfo(key_cache.dtype).max
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        quotient = key[token].float() / scale[:, None]
        stored = quotient.clamp(-largest, largest).to(key_cache.dtype)
        key_cache[slot // block_size, slot % block_size] = stored
