"""int4_per_token_head: rotated rows in codes of four bits, with one scale per token and head.

A row is rotated before it is coded. An outlier in one channel then becomes a small number in all
channels, so 16 levels are enough for more of them. Keys and queries are rotated alike, which keeps
dot products. Here reading rotates back instead, so that every reader gets the numbers themselves.

The levels are 0 to 15, two of them in a byte. One of them, the zero point, stands for 0. It is
stored in the last four bits of the scale.
"""

from functools import cache

import torch
from torch import Tensor

SMALLEST_SCALE = 1e-6
"""The scale of a row of zeros."""
SEED = 0x9E3779B9
"""Seed of torch's generator on the host from which the signs of the rotation are drawn."""
LARGEST_BLOCK = 512
"""Channels that are rotated together, at most."""


def store(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers, and the scale of each head with its zero point.

    The arithmetic is float32; the rotated row is rounded to the dtype of the numbers, but for
    numbers that float16 does not reach. A level is rounded to nearest, half away from zero. The
    levels reach from the smallest number to the largest one, and 0 is always among them. NaN
    spreads over its block of channels, does not count for the levels, and its code is 0.

    Args:
        numbers: [..., heads, head_size].
        scale: Not read: it is measured.

    Returns:
        [..., heads, head_size / 2] uint8, and [..., heads] float32.

    Example:
        Two channels are rotated to their sum and difference, here 15 and 0 (the second sign is -1).

        >>> row = torch.tensor([[7.5, -7.5]])
        >>> codes, scale = store(row, torch.ones(1), torch.uint8)
        >>> codes, scale
        (tensor([[15]], dtype=torch.uint8), tensor([1.]))
        >>> load(codes, scale, torch.float32)
        tensor([[ 7.5000, -7.5000]])
    """
    rotated = rotate(numbers)
    smallest, largest = extremes(rotated)
    return levels_between(rotated, smallest.clamp(max=0), largest.clamp(min=0))


def extremes(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number of each row, without NaN: [..., heads].

    Both are 0 in a row of NaN.
    """
    is_number = ~rotated.isnan()
    smallest = rotated.where(is_number, torch.inf).amin(-1)
    largest = rotated.where(is_number, -torch.inf).amax(-1)
    has_numbers = is_number.any(-1)
    return smallest.where(has_numbers, 0.0), largest.where(has_numbers, 0.0)


def levels_between(
    rotated: Tensor, smallest: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the codes of rotated rows, and the scale of each with its zero point.

    Args:
        rotated: [..., heads, head_size] float32.
        smallest, largest: [..., heads] what level 0 and level 15 stand for.
    """
    # on a GPU torch divides by a Python number by multiplying with its inverse, so use a tensor
    divisor = torch.tensor(15.0, device=rotated.device)
    # infinity less infinity is NaN
    step = (largest - smallest).nan_to_num(nan=0.0, posinf=torch.inf) / divisor
    measured = step.clamp(min=SMALLEST_SCALE)
    zero_point = to_level(-smallest / measured)
    levels = to_level(rotated * (1 / measured)[..., None] + zero_point[..., None])
    pairs = levels.to(torch.uint8)
    low, high = pairs[..., ::2], pairs[..., 1::2]
    bits = (measured.view(torch.int32) & ~15) | zero_point.to(torch.int32)
    return low | high << 4, bits.view(torch.float32)


def load(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return levels less the zero point, rotated back and times the scale.

    The rotation is exact: it adds integers below 2^13.

    Args:
        codes: [..., heads, head_size / 2].
        scale: [..., heads], with zero points.
        dtype: Of the arithmetic and of the result.
    """
    bits = scale.view(torch.int32)
    levels = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    steps = levels.float() - (bits & 15)[..., None]
    size = steps.shape[-1]
    numbers = hadamard(steps) * signs(size, steps.device)
    step = (bits & ~15).view(torch.float32).to(dtype) / block_of(size)
    return numbers.to(dtype) * step[..., None]


def to_level(numbers: Tensor) -> Tensor:
    """Return numbers rounded to levels from 0 to 15, half away from zero; NaN becomes 0."""
    return (numbers.nan_to_num(nan=0.0) + 0.5).clamp(0.5, 15.5).floor()


def rotate(numbers: Tensor) -> Tensor:
    """Return rows times the signs, transformed, as float32 that is rounded to their dtype.

    Norms grow by the square root of the block. So a sum of float16 numbers may be one that float16
    does not reach, and is not rounded.
    """
    signed = numbers.float() * signs(numbers.shape[-1], numbers.device)
    turned = hadamard(signed)
    rounded = turned.to(numbers.dtype).float()
    if numbers.dtype == torch.float16:
        rounded = rounded.where(rounded.isfinite(), turned)
    return rounded


def hadamard(numbers: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of each block of channels, not normalised.

    Args:
        numbers: [..., head_size] float32.

    Example:
        >>> hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([10., -2., -4.,  0.])
    """
    shape, stride = numbers.shape, 1
    while stride < block_of(shape[-1]):
        pairs = numbers.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride)
        one, other = pairs.unbind(-2)
        numbers = torch.stack([one + other, one - other], dim=-2).reshape(shape)
        stride *= 2
    return numbers


def block_of(head_size: int) -> int:
    """Return the channels that are rotated together: the largest power of two in the head size."""
    return min(head_size & -head_size, LARGEST_BLOCK)


def signs(head_size: int, device: torch.device) -> Tensor:
    """Return the sign of each channel, the same in every block: [head_size] float32."""
    block = block_of(head_size)
    return drawn_signs()[:block].repeat(head_size // block).to(device)


@cache
def drawn_signs() -> Tensor:
    """Return the signs of the largest block, of which the smaller ones are the first."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    chances = torch.full((LARGEST_BLOCK,), 0.5, device="cpu")
    return torch.bernoulli(chances, generator=generator) * 2 - 1
