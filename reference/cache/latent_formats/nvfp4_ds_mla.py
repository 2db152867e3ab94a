"""nvfp4_ds_mla: 352 bytes per token, with codes of four bits.

| bytes | content |
|---|---|
| 0 to 255 | float4_e2m1 codes of the latent, two per byte, the even element in the low bits |
| 256 to 319 | rope key, 64 float8_e4m3fn elements without a scale |
| 320 to 351 | 32 float8_e4m3fn scales, one per 16 codes |

The scale of tile i is byte 320 + 8 * (i % 4) + i // 4.

A code has three bits for its size, 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and one for its sign. A code times
its scale has 6 significant bits, so it is exact in bfloat16.
"""

import torch
from torch import Tensor

from ..formats.nvfp4 import encode_e2m1, meaning
from .fp8_ds_mla import decode_e4m3, encode_e4m3, finite_size, into_tiles

TILE = 16
SMALLEST_SCALE = 2.0**-9
"""The smallest number of float8_e4m3fn."""


def store(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return the records of tokens.

    The scale of a tile is its largest size / 6, at least SMALLEST_SCALE, rounded to float8_e4m3fn:
    at most 448. An element times the inverse of the scale is rounded to the nearest code, half to
    the even one. Beyond 6 it becomes 6 with its sign: elements beyond 2,688 are lost. NaN does not
    count for the scale, and it becomes 6, since no code means NaN.

    Args:
        kv_c: [tokens, 512] float32.
        k_pe: [tokens, 64] float32. Elements beyond 448 become 448 with their sign.

    Returns:
        [tokens, 352] uint8.

    Source:
        vLLM 0.33, `fused_norm_rope`.

    Example:
        The largest size is 3, so the scale is 0.5. The elements are -6, 0.6 and 5 times it: half of
        5 and 6 goes to the code with an even number.

        >>> latent = torch.zeros(1, 512)
        >>> latent[0, :3] = torch.tensor([-3.0, 0.3, 2.5])
        >>> record = store(latent, torch.ones(1, 64))
        >>> record[0, :2].tolist()  # 7 + 8, 1; 6, 0
        [31, 6]
        >>> load(record, torch.float32)[0, :3]
        tensor([-3.0000,  0.2500,  2.0000])
    """
    tiles = into_tiles(kv_c, TILE)
    size = finite_size(tiles) * (1 / 6)
    scales = encode_e4m3(size.clamp(min=SMALLEST_SCALE))  # [tokens, 32]
    inverse = 1 / decode_e4m3(scales, torch.float32)
    codes = encode_e2m1(tiles * inverse[..., None]).flatten(1)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    stored_scales = into_tiles(scales, 4).transpose(1, 2).flatten(1)
    return torch.cat([pairs, encode_e4m3(k_pe), stored_scales], 1)


def load(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times scales, and the rope keys after them: [tokens, 576] in `dtype`.

    Args:
        records: [tokens, 352] uint8.
    """
    pairs, rope, stored_scales = torch.split(records, [256, 64, 32], 1)
    codes = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)
    numbers = meaning(codes, dtype)
    scales = into_tiles(stored_scales, 8).transpose(1, 2).flatten(1)
    scale = decode_e4m3(scales, dtype)
    tiles = into_tiles(numbers, TILE) * scale[..., None]
    return torch.cat([tiles.flatten(1), decode_e4m3(rope, dtype)], 1)
