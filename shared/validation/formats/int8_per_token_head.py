"""Validation of scales that a write measures: one per token and head."""

import torch
from torch import Tensor

from ...contract.argument_tensors import reject_gradients
from ..primitives import check_dtype, check_same_device


def validate(
    name: str, scale: Tensor | float | None, cache: Tensor, contents: bool
) -> None:
    """Raise if the scales are not [num_blocks, block_size, kv_heads] float32.

    Their numbers are not read: those of slots that are not used may be anything.
    """
    expected = f"float32 scales {list(cache.shape[:3])}, one per slot and head"
    if not isinstance(scale, Tensor):
        raise ValueError(
            f"{name} = {scale}: expected {expected}, as the cache is {cache.dtype}"
        )
    reject_gradients(**{name: scale})
    check_dtype(name, scale, torch.float32)
    if scale.shape != cache.shape[:3]:
        raise ValueError(f"{name} has shape {list(scale.shape)}: expected {expected}")
    check_same_device(key_cache=cache, **{name: scale})
