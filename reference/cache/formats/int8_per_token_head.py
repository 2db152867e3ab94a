"""int8_per_token_head: codes from -127 to 127, with one scale per token and head.

The scale makes the element of the largest size 127. It is measured at the write.
"""

import torch
from torch import Tensor

SMALLEST_SCALE = 1e-6
"""The scale of a row of zeros, and of any row whose largest size is below 127e-6."""


def store(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers, and the scale of each head.

    The arithmetic is float32. A quotient is rounded to nearest, half away from zero. NaN does not
    count for the scale, and its code is -128. A row with an infinite element has an infinite scale;
    the codes of its infinite elements are -128, of the others 0.

    Args:
        numbers: [..., heads, elements].
        scale: Not read: it is measured.

    Returns:
        [..., heads, elements] int8, and [..., heads] float32.

    Example:
        The largest size is 127, so the scale is 1. Half of a code is rounded away from zero.

        >>> row = torch.tensor([[127.0, -2.5, 0.25]])
        >>> store(row, torch.ones(1), torch.int8)
        (tensor([[127,  -3,   0]], dtype=torch.int8), tensor([1.]))
    """
    numbers = numbers.float()
    # on a GPU torch divides by a Python number by multiplying with its inverse, so use a tensor
    divisor = torch.tensor(127.0, device=numbers.device)
    measured = (largest_size(numbers) / divisor).clamp(min=SMALLEST_SCALE)
    quotient = numbers * (1 / measured)[..., None]
    away = quotient + torch.where(quotient >= 0, 0.5, -0.5)
    # infinity * 0 is NaN
    codes = away.nan_to_num(nan=-128.0).clamp(-128, 127).trunc()
    return codes.to(dtype), measured


def largest_size(numbers: Tensor) -> Tensor:
    """Return the largest absolute value of each row, without NaN: [..., heads]."""
    return numbers.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)


def load(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times the scale of their token and head, in the dtype of the arithmetic.

    Args:
        codes: [..., heads, elements].
        scale: [..., heads].
    """
    return (codes.to(dtype) * scale[..., None]).to(dtype)
