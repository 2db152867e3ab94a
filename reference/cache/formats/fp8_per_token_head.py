"""fp8_per_token_head: float8_e4m3fn codes, with one scale per token and head.

The scale makes the element of the largest size 448, the largest code. It is measured at the write.
"""

import torch
from torch import Tensor

from .int8_per_token_head import SMALLEST_SCALE, largest_size
from .int8_per_token_head import load as load


def store(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers, and the scale of each head.

    The arithmetic is float32. A quotient is rounded to nearest, half to even. NaN does not count
    for the scale, and its code is -448. A row with an infinite element has an infinite scale; the
    codes of its infinite elements are -448, of the others 0 with their sign.

    Args:
        numbers: [..., heads, elements].
        scale: Not read: it is measured.

    Returns:
        [..., heads, elements] float8_e4m3fn, and [..., heads] float32.

    Example:
        The largest size is 448, so the scale is 1. Between 16 and 32 codes are 2 apart.

        >>> row = torch.tensor([[448.0, -17.5, 0.25]])
        >>> codes, scale = store(row, torch.ones(1), torch.float8_e4m3fn)
        >>> codes.float(), scale
        (tensor([[448.0000, -18.0000,   0.2500]]), tensor([1.]))
    """
    numbers = numbers.float()
    # on a GPU torch divides by a Python number by multiplying with its inverse, so use a tensor
    divisor = torch.tensor(448.0, device=numbers.device)
    measured = (largest_size(numbers) / divisor).clamp(min=SMALLEST_SCALE)
    quotient = numbers * (1 / measured)[..., None]
    # infinity * 0 is NaN
    codes = quotient.nan_to_num(nan=-448.0).clamp(-448, 448)
    return codes.to(dtype), measured
