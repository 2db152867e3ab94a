"""fp8_ds_mla_v4: 584 bytes per token, the record of DeepSeek-V4.

| bytes | content |
|---|---|
| 0 to 447 | float8_e4m3fn codes of the latent |
| 448 to 575 | rope key, 64 bfloat16 elements |
| 576 to 582 | 7 scales, one per 64 codes: the exponent of a power of two, plus 127 |
| 583 | 0 |

A block stores bytes 0 to 575 of all its tokens, then the 8 last bytes of all, and its size is
padded to a multiple of 576.
"""

import torch
from torch import Tensor

from .fp8_ds_mla import (
    ceil_log2,
    decode_bfloat16,
    decode_e4m3,
    encode_bfloat16,
    encode_e4m3,
    finite_size,
    into_tiles,
    power_of_two,
)

TILE = 64
SMALLEST_SIZE = 1e-4
"""A tile's largest size counts as this one at least, so the smallest scale is 2^-22."""


def store(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return the records of tokens.

    The scale of a tile is its largest size, at least SMALLEST_SIZE, / 448, rounded up to a power of
    two. Codes, NaN and infinity are as in `fp8_ds_mla`.

    Args:
        kv_c: [tokens, 448] float32.
        k_pe: [tokens, 64] float32.

    Returns:
        [tokens, 584] uint8.

    Source:
        vLLM 0.33, `quantize_and_insert_k_cache` of DeepSeek-V4.

    Example:
        3 / 448 is rounded up to 2^-7: byte 120. Tiles of zeros have 2^-22.

        >>> latent = torch.zeros(1, 448)
        >>> latent[0, :2] = torch.tensor([-3.0, 0.3])
        >>> record = store(latent, torch.ones(1, 64))
        >>> record[0, 576:].tolist()
        [120, 105, 105, 105, 105, 105, 105, 0]
        >>> load(record, torch.float32)[0, :2]
        tensor([-3.0000,  0.3125])
    """
    tiles = into_tiles(kv_c, TILE)
    # on a GPU torch divides by a Python number by multiplying with its inverse, so use a tensor
    divisor = torch.tensor(448.0, device=kv_c.device)
    exponent = ceil_log2(finite_size(tiles).clamp(min=SMALLEST_SIZE) / divisor)
    codes = encode_e4m3(tiles / power_of_two(exponent)[..., None]).flatten(1)
    scales = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1))
    return torch.cat([codes, encode_bfloat16(k_pe), scales], 1)


def load(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times scales, and the rope keys after them: [tokens, 512] in `dtype`.

    Args:
        records: [tokens, 584] uint8.
    """
    codes, rope, scales, _ = torch.split(records, [448, 128, 7, 1], 1)
    scale = decode_exponents(scales).to(dtype)
    tiles = into_tiles(decode_e4m3(codes, dtype), TILE) * scale[..., None]
    return torch.cat([tiles.flatten(1), decode_bfloat16(rope, dtype)], 1)


def decode_exponents(scales: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float64: byte 0 is 2^-127, and byte 255 is NaN."""
    bits = (scales.long() - 127 + 1023) << 52
    return bits.view(torch.float64).masked_fill(scales == 255, torch.nan)
