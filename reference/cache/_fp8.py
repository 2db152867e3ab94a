"""How does a number become one of eight bits?"""

import torch
from torch import Tensor


def quantise(tensor: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `tensor / scale` in an FP8 dtype, rounded to nearest even.

    Args:
        tensor: [..., heads, elements].
        scale: one number, or one a head.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2; what lies past its largest number
            becomes that number, NaN stays NaN.
    """
    largest = torch.finfo(dtype).max
    # a tensor: on a GPU torch divides by a Python number by multiplying with its inverse
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=tensor.device)
    return (tensor.float() / per_head(divisor)).clamp(-largest, largest).to(dtype)


def dequantise(tensor: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return FP8 numbers times `scale`, computed in float32, in another dtype.

    Args:
        tensor: [..., heads, elements].
        scale: one number, or one a head.
        dtype: of the result.
    """
    return (tensor.float() * per_head(scale)).to(dtype)


def per_head(scale: Tensor | float) -> Tensor | float:
    """Return a scale in a shape that multiplies [..., heads, elements]."""
    return scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale
