"""Latent records by hand: the rules of their bytes, on arrays in NumPy.

Codes come from a search for the nearest number in the table of all numbers that codes mean. Nothing
is shared with either twin.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Rows: TypeAlias = np.ndarray[Any, Any]

E4M3 = np.array(
    [
        (code & 7) * 2.0**-9
        if code < 8
        else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
        for code in range(127)
    ]
)
"""What the codes 0 to 126 of float8_e4m3fn mean; 127 is NaN, and bit 7 the sign."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""What the codes 0 to 7 of float4_e2m1 mean; bit 3 is the sign."""


def nearest(numbers: Rows, table: Rows, of_nan: int, sign: int) -> Rows:
    """Return the codes of numbers, half to the even code, the largest for those beyond it.

    Args:
        table: What the codes without a sign mean, rising.
        of_nan: The code of NaN.
        sign: The bit of the sign.
    """
    sizes = np.nan_to_num(np.abs(numbers.astype(np.float64)), nan=0.0, posinf=1e300)
    above = np.searchsorted(table, sizes).clip(1, len(table) - 1)
    low, high = sizes - table[above - 1], table[above] - sizes
    takes_above = (low > high) | ((low == high) & (above % 2 == 0))
    codes = np.where(takes_above, above, above - 1) + sign * np.signbit(numbers)
    return np.where(np.isnan(numbers), of_nan, codes).astype(np.uint8)


def meant(codes: Rows, table: Rows, sign: int) -> Rows:
    """Return what codes mean, in float64; codes past the table are NaN."""
    sizes = np.append(table, np.nan)[codes % sign]
    numbers: Rows = np.where(codes >= sign, -sizes, sizes)
    return numbers


def tiles_of(rows: Rows, tile: int) -> tuple[Rows, Rows]:
    """Return rows in tiles, and the largest size of each, at most the largest float32."""
    tiles = rows.reshape(len(rows), rows.shape[1] // tile, tile)
    sizes = np.where(np.isnan(tiles), np.float32(0), np.abs(tiles))
    return tiles, np.minimum(sizes.max(2), np.finfo(np.float32).max)


def bfloat16_bytes(rows: Rows) -> Rows:
    """Return bfloat16 elements as bytes, rounded to nearest, half to even."""
    sizes = np.nan_to_num(np.abs(rows.astype(np.float64)), nan=0.0, posinf=1e300)
    exponents = np.floor(np.log2(np.maximum(sizes, 2.0**-126)))
    steps = np.exp2(exponents - 7)
    with np.errstate(over="ignore"):
        rounded = (np.rint(sizes / steps) * steps).astype(np.float32)
    bits = (rounded.view(np.uint32) >> 16) + 0x8000 * np.signbit(rows).astype(np.uint32)
    return np.where(np.isnan(rows), 0x7FC0, bits).astype("<u2").view(np.uint8)


def bfloat16_numbers(elements: Rows) -> Rows:
    """Return what bytes of bfloat16 elements mean, in float64."""
    bits = np.ascontiguousarray(elements).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64)


def store_fp8(kv_c: Rows, k_pe: Rows) -> Rows:
    """Return records of fp8_ds_mla: [tokens, 656]."""
    tiles, sizes = tiles_of(kv_c, 128)
    scales = np.maximum(sizes * np.float32(1 / 448), np.float32(1e-4))
    scales = np.exp2(np.ceil(np.log2(scales.astype(np.float64))))
    codes = nearest(tiles / scales[..., None], E4M3, 127, 128)
    fields = scales.astype("<f4").view(np.uint8)
    return np.concatenate(
        [codes.reshape(len(kv_c), 512), fields, bfloat16_bytes(k_pe)], 1
    )


def load_fp8(records: Rows) -> Rows:
    """Return what records of fp8_ds_mla mean: [tokens, 576]."""
    scales = np.ascontiguousarray(records[:, 512:528]).view("<f4").astype(np.float64)
    numbers = meant(records[:, :512], E4M3, 128).reshape(len(records), 4, 128)
    latents = (numbers * scales[..., None]).reshape(len(records), 512)
    return np.concatenate([latents, bfloat16_numbers(records[:, 528:])], 1)


def store_v4(kv_c: Rows, k_pe: Rows) -> Rows:
    """Return records of fp8_ds_mla_v4: [tokens, 584]."""
    tiles, sizes = tiles_of(kv_c, 64)
    quotients = np.maximum(sizes, np.float32(1e-4)) / np.float32(448)
    exponents = np.ceil(np.log2(quotients.astype(np.float64)))
    codes = nearest(tiles / np.exp2(exponents)[..., None], E4M3, 127, 128)
    scales = np.zeros((len(kv_c), 8), np.uint8)
    scales[:, :7] = exponents + 127
    return np.concatenate(
        [codes.reshape(len(kv_c), 448), bfloat16_bytes(k_pe), scales], 1
    )


def load_v4(records: Rows) -> Rows:
    """Return what records of fp8_ds_mla_v4 mean: [tokens, 512]."""
    exponents = records[:, 576:583].astype(np.float64) - 127
    scales = np.where(exponents == 128, np.nan, np.exp2(exponents))
    numbers = meant(records[:, :448], E4M3, 128).reshape(len(records), 7, 64)
    latents = (numbers * scales[..., None]).reshape(len(records), 448)
    return np.concatenate([latents, bfloat16_numbers(records[:, 448:576])], 1)


PLACES = [8 * (tile % 4) + tile // 4 for tile in range(32)]
"""The byte of each tile's scale among the scales of nvfp4_ds_mla."""


def store_nvfp4(kv_c: Rows, k_pe: Rows) -> Rows:
    """Return records of nvfp4_ds_mla: [tokens, 352]."""
    tiles, sizes = tiles_of(kv_c, 16)
    scales = nearest(np.maximum(sizes * np.float32(1 / 6), 2.0**-9), E4M3, 127, 128)
    inverse = np.float32(1) / E4M3[scales].astype(np.float32)
    with np.errstate(over="ignore"):
        quotients = tiles * inverse[..., None]
    codes = nearest(quotients, E2M1, 7, 8).reshape(len(kv_c), 512)
    stored = np.zeros_like(scales)
    stored[:, PLACES] = scales
    pairs = codes[:, ::2] + 16 * codes[:, 1::2]
    return np.concatenate([pairs, nearest(k_pe, E4M3, 127, 128), stored], 1)


def load_nvfp4(records: Rows) -> Rows:
    """Return what records of nvfp4_ds_mla mean: [tokens, 576]."""
    pairs, rope = records[:, :256], records[:, 256:320]
    codes = np.stack([pairs % 16, pairs // 16], 2).reshape(len(records), 32, 16)
    scales = meant(records[:, 320:][:, PLACES], E4M3, 128)
    latents = (meant(codes, E2M1, 8) * scales[..., None]).reshape(len(records), 512)
    return np.concatenate([latents, meant(rope, E4M3, 128)], 1)


RULES: dict[str, tuple[Callable[[Rows, Rows], Rows], Callable[[Rows], Rows]]] = {
    "fp8_ds_mla": (store_fp8, load_fp8),
    "nvfp4_ds_mla": (store_nvfp4, load_nvfp4),
    "fp8_ds_mla_v4": (store_v4, load_v4),
}
"""The rule of each format: how a record is stored, and what it means."""


def store_by_hand(name: str, kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return the records of tokens, [tokens, bytes] uint8, on the host."""
    store, _ = RULES[name]
    rows = store(kv_c.cpu().float().numpy(), k_pe.cpu().float().numpy())
    return torch.from_numpy(rows)


def load_by_hand(name: str, records: Tensor) -> Tensor:
    """Return what records mean, [tokens, elements] float64, on the host."""
    _, load = RULES[name]
    with np.errstate(invalid="ignore", over="ignore"):
        return torch.from_numpy(load(records.cpu().numpy()))
