"""Validation of block scales that a write measures: one per 16 channels of a slot and head."""

import torch
from torch import Tensor

from ...contract.argument_tensors import reject_gradients
from ...contract.cache_formats import FORMATS, head_size_of
from ..primitives import check_dtype, check_same_device

STEP = FORMATS["nvfp4"].channels_per_scale


def validate(
    name: str, scale: Tensor | float | None, cache: Tensor, contents: bool
) -> None:
    """Raise if the scales are not [num_blocks, block_size, kv_heads, blocks] float8_e4m3fn.

    Their numbers are not read: those of slots that are not used may be anything.
    """
    head_size = head_size_of(cache)
    if head_size % STEP:
        raise ValueError(
            f"{name} has block scales but the head size is {head_size}: expected a multiple of"
            f" {STEP}, the channels of a block"
        )
    shape = [*cache.shape[:3], head_size // STEP]
    expected = (
        f"float8_e4m3fn scales {shape}, one per {STEP} channels of a slot and head"
    )
    if not isinstance(scale, Tensor):
        raise ValueError(f"{name} = {scale}: expected {expected}")
    reject_gradients(**{name: scale})
    check_dtype(name, scale, torch.float8_e4m3fn)
    if list(scale.shape) != shape:
        raise ValueError(f"{name} has shape {list(scale.shape)}: expected {expected}")
    check_same_device(key_cache=cache, **{name: scale})
