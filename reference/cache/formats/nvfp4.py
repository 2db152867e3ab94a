"""nvfp4: float4_e2m1 codes, two in a byte, with a float8_e4m3fn scale per block of 16 channels.

A number is its code times the scale of its block, times the global scale of all keys or of all
values. The global scale is given. Block scales are measured at the write: the element of the
largest size of a block becomes 6, the largest code. A code times its block scale has 6 significant
bits, so it is exact in float16 and bfloat16.
"""

import torch
from torch import Tensor

from .int8_per_token_head import largest_size

CHANNELS = 16
"""Channels of a block."""
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The size that each code means."""
LARGEST_SCALE = 448.0
"""The largest number of float8_e4m3fn."""


def store(numbers: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers, and the scale of each block.

    The arithmetic is float32. A block scale is the largest size / 6 / the global scale, rounded to
    nearest, half to even, and at most 448. An element is divided by the product of both scales and
    rounded to the nearest code, half to the even one. Beyond 6 it becomes 6. Signs are kept, also
    that of -0.0. If the product is 0, all codes of the block are 0.

    NaN does not count for the block scale, and its code is 6, since no code means NaN. A block with
    an infinite element has the scale 448, and the code of that element is 6 with its sign.

    Args:
        numbers: [..., heads, head_size].
        scale: The global scale.

    Returns:
        [..., heads, head_size / 2] uint8 with the even channel in the low bits, and
        [..., heads, head_size / 16] float8_e4m3fn.

    Source:
        vLLM's `reshape_and_cache_flash` for `kv_cache_dtype="nvfp4"`.

    Example:
        The largest size is 3 and the global scale 0.25, so the block scale is 2 and a code times
        0.5 is the number. 2.5 is 5 times that, between 4 and 6: the code of 4 is even.

        >>> row = torch.zeros(1, 16)
        >>> row[0, :3] = torch.tensor([-3.0, 0.6, 2.5])
        >>> codes, scales = store(row, 0.25, torch.uint8)
        >>> codes[0, :2].tolist(), float(scales)  # 7 + 8, 2; 6, 0
        ([47, 6], 2.0)
        >>> 0.25 * load(codes, scales, torch.float32)[0, :3]
        tensor([-3.0000,  0.5000,  2.0000])
    """
    blocks = into_blocks(numbers.float())
    scales = measure(blocks, scale, 6.0)
    return in_pairs(nearest_codes(blocks, scales, scale)), scales


def load(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times the scales of their blocks, which is exact, without the global scale.

    Args:
        codes: [..., heads, head_size / 2].
        scale: [..., heads, head_size / 16].
        dtype: Of the arithmetic and of the result.
    """
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1)
    numbers = meaning(pairs.flatten(-2), dtype)
    return (into_blocks(numbers) * scale.to(dtype)[..., None]).flatten(-2)


def into_blocks(numbers: Tensor) -> Tensor:
    """Return numbers in blocks: [..., heads, head_size / 16, 16]."""
    return numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // CHANNELS, CHANNELS)


def measure(blocks: Tensor, scale: float, largest: float) -> Tensor:
    """Return the scales that make the largest size of each block `largest`, in float8_e4m3fn.

    Args:
        blocks: [..., blocks, 16] float32.
        scale: The global scale.
    """
    # on a GPU torch divides by a Python number by multiplying with its inverse, so use tensors
    divisors = torch.tensor([largest, scale], device=blocks.device)
    sizes = largest_size(blocks) / divisors[0] / divisors[1]
    return sizes.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)


def nearest_codes(blocks: Tensor, scales: Tensor, scale: float) -> Tensor:
    """Return the code of each element as uint8: [..., blocks, 16]."""
    steps = (scales.float() * scale)[..., None]
    return encode_e2m1(blocks / steps).masked_fill(steps == 0, 0)


def encode_e2m1(numbers: Tensor) -> Tensor:
    """Return codes of four bits as uint8, rounded to nearest, half to the even code."""
    size = numbers.abs().nan_to_num(nan=6.0).clamp(max=6)
    # below 2 codes are 0.5 apart, then 1, then 2
    code = torch.where(
        size < 2,
        (size * 2).round(),
        torch.where(size < 4, size.round() + 2, (size / 2).round() + 4),
    )
    is_negative = numbers.signbit() & ~numbers.isnan()
    return code.to(torch.uint8) | is_negative.to(torch.uint8) << 3


def meaning(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes from 0 to 15 mean."""
    sizes = torch.tensor(SIZES, dtype=dtype, device=codes.device)
    return torch.cat([sizes, -sizes])[codes.long()]


def in_pairs(codes: Tensor) -> Tensor:
    """Return the codes of blocks, two in a byte: [..., heads, head_size / 2]."""
    rows = codes.flatten(-2)
    return rows[..., ::2] | rows[..., 1::2] << 4
