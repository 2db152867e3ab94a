"""FP8 cache: numbers are divided by a scale, rounded to eight bits, and multiplied again."""

import torch
from torch import Tensor


def store(
    numbers: Tensor, scale: Tensor | float, dtype: torch.dtype
) -> tuple[Tensor, None]:
    """Return the codes of numbers. The scale is given."""
    return quantise(numbers, scale, dtype), None


def load(codes: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return codes times their scale, multiplied in the dtype of the arithmetic.

    Args:
        codes: [..., heads, elements].
        scale: One number, or one per head.
    """
    return (codes.to(dtype) * per_head(scale)).to(dtype)


def quantise(tensor: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `tensor / scale` in an FP8 dtype, rounded to nearest even.

    Args:
        tensor: [..., heads, elements].
        scale: One number, or one per head.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2. Numbers beyond its largest one become
            that one. NaN remains NaN.
    """
    largest = torch.finfo(dtype).max
    # on a GPU torch divides by a Python number by multiplying with its inverse, so use a tensor
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=tensor.device)
    return (tensor.float() / per_head(divisor)).clamp(-largest, largest).to(dtype)


def per_head(scale: Tensor | float) -> Tensor | float:
    """Return a scale in a shape that broadcasts to [..., heads, elements]."""
    return scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale
