"""Plain cache: numbers are stored as they are."""

import torch
from torch import Tensor


def store(numbers: Tensor, scale: None, dtype: torch.dtype) -> tuple[Tensor, None]:
    """Return the numbers. A plain cache has their dtype, and no scales."""
    return numbers, None


def load(numbers: Tensor, scale: None, dtype: torch.dtype) -> Tensor:
    """Return the numbers in the dtype of the arithmetic."""
    return numbers.to(dtype)
