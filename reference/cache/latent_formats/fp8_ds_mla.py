"""fp8_ds_mla: 656 bytes per token, the record of DeepSeek-V3.2.

| bytes | content |
|---|---|
| 0 to 511 | float8_e4m3fn codes of the latent |
| 512 to 527 | 4 float32 scales, one per 128 codes |
| 528 to 655 | rope key, 64 bfloat16 elements |

A scale is a power of two, so a code times its scale is exact in bfloat16.
"""

import torch
from torch import Tensor

from ..formats.fp8 import quantise
from ..formats.int8_per_token_head import largest_size

TILE = 128
SMALLEST_SCALE = 1e-4
"""Smaller scales are raised to it. Rounded up to a power of two it is 2^-13."""


def store(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return the records of tokens.

    The scale of a tile is its largest size / 448, at least SMALLEST_SCALE, rounded up to a power of
    two. A quotient is rounded to nearest, half to even. NaN does not count for the scale, and its
    code is NaN. An infinite element counts as the largest float32, and its code is 448, or -448.

    Args:
        kv_c: [tokens, 512] float32.
        k_pe: [tokens, 64] float32.

    Returns:
        [tokens, 656] uint8.

    Source:
        vLLM 0.33, `fused_norm_rope`.

    Example:
        The largest size is 3: 3 / 448 = 0.0067 is rounded up to 2^-7, and 3 * 128 = 384 is a code.
        Codes from 32 to 64 are 4 apart, so 0.3 * 128 = 38.4 becomes 40.

        >>> latent = torch.zeros(1, 512)
        >>> latent[0, :2] = torch.tensor([-3.0, 0.3])
        >>> record = store(latent, torch.ones(1, 64))
        >>> load(record, torch.float32)[0, :2]
        tensor([-3.0000,  0.3125])
    """
    tiles = into_tiles(kv_c, TILE)
    size = finite_size(tiles) * (1 / 448)
    scale = power_of_two(ceil_log2(size.clamp(min=SMALLEST_SCALE)))
    codes = encode_e4m3(tiles / scale[..., None]).flatten(1)
    return torch.cat([codes, scale.view(torch.uint8), encode_bfloat16(k_pe)], 1)


def load(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times scales, and the rope keys after them: [tokens, 576] in `dtype`.

    Args:
        records: [tokens, 656] uint8.
    """
    codes, scale, rope = torch.split(records, [512, 16, 128], 1)
    scale = scale.contiguous().view(torch.float32).to(dtype)
    tiles = into_tiles(decode_e4m3(codes, dtype), TILE) * scale[..., None]
    return torch.cat([tiles.flatten(1), decode_bfloat16(rope, dtype)], 1)


def into_tiles(numbers: Tensor, tile: int) -> Tensor:
    """Return the elements of tokens in tiles: [tokens, tiles, tile]."""
    tokens, width = numbers.shape
    return numbers.reshape(tokens, width // tile, tile)


def finite_size(tiles: Tensor) -> Tensor:
    """Return the largest size of each tile without NaN, at most the largest float32."""
    return largest_size(tiles).clamp(max=torch.finfo(torch.float32).max)


def ceil_log2(size: Tensor) -> Tensor:
    """Return the exponent of the smallest power of two that is at least `size`, above 0.

    A logarithm in float32 would be rounded: a size just above a power of two would get that one.
    """
    mantissa, exponent = torch.frexp(size)  # mantissa from 0.5 to below 1
    return exponent - (mantissa == 0.5).int()


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32; the exponent is that of a normal number."""
    return ((exponent + 127) << 23).view(torch.float32)


def encode_e4m3(numbers: Tensor) -> Tensor:
    """Return float8_e4m3fn codes as bytes, rounded to nearest even. Every NaN is byte 0x7F."""
    codes = quantise(numbers, 1.0, torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(numbers.isnan(), 0x7F)


def decode_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that bytes mean."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(dtype)


def encode_bfloat16(numbers: Tensor) -> Tensor:
    """Return bfloat16 elements as bytes: [tokens, 2 * elements]. Every NaN is 0x7FC0."""
    bits = numbers.to(torch.bfloat16).view(torch.int16)
    return bits.masked_fill(numbers.isnan(), 0x7FC0).view(torch.uint8)


def decode_bfloat16(elements: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that bytes mean: [tokens, elements]."""
    return elements.contiguous().view(torch.bfloat16).to(dtype)
