"""Cache formats by hand: the rule of each format, on arrays of float32 in NumPy.

A rule gets rows of numbers, a scale and the dtype of the numbers, and returns the codes and the
scale of each row. It shares no code with either twin.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...contract.cache_formats import CacheFormat

Rows: TypeAlias = np.ndarray[Any, Any]
Rule: TypeAlias = Callable[[Rows, Any, torch.dtype], tuple[Rows, Any]]


def measured(rows: Rows, largest: int) -> tuple[Rows, Rows]:
    """Return rows divided by scales that make their largest size `largest`, and the scales."""
    sizes = np.where(np.isnan(rows), np.float32(0), np.abs(rows))
    scales = np.maximum(sizes.max(-1) / np.float32(largest), np.float32(1e-6))
    with np.errstate(invalid="ignore"):
        return rows * (np.float32(1) / scales)[..., None], scales


def int8_per_token_head(
    rows: Rows, scale: Any, dtype: torch.dtype
) -> tuple[Rows, Rows]:
    """Return codes and scales; the scale is not read."""
    quotients, scales = measured(rows, 127)
    is_number = np.isfinite(quotients)
    away = np.floor(np.abs(np.where(is_number, quotients, 0)) + np.float32(0.5))
    codes = np.where(is_number, np.copysign(away, quotients), -128)
    return codes.astype(np.int8), scales


def fp8_per_token_head(rows: Rows, scale: Any, dtype: torch.dtype) -> tuple[Rows, Rows]:
    """Return codes as bytes, and scales; the scale is not read."""
    quotients, scales = measured(rows, 448)
    quotients = np.where(np.isfinite(quotients), quotients, np.float32(-448))
    sizes = np.minimum(np.abs(quotients), np.float32(448)).astype(np.float64)
    # codes of one power of two are an eighth of it apart; below 2^-6 they are 2^-9 apart
    powers = np.exp2(np.floor(np.log2(np.maximum(sizes, 2.0**-6))))
    steps = np.rint(sizes / (powers / 8))  # half to even
    exponents = np.log2(powers).astype(np.int64) + 7
    # a subnormal has the exponent bits of 0; 16 steps are the next power of two
    codes = np.where(sizes < 2.0**-6, steps, exponents * 8 + steps - 8)
    return (codes + 128 * np.signbit(quotients)).astype(np.uint8), scales


def signs(channels: int) -> Rows:
    """Return the sign of each channel of a rotation: 0x9E3779B9 seeds torch's generator."""
    generator = torch.Generator(device="cpu").manual_seed(0x9E3779B9)
    heads = torch.full((512,), 0.5, device="cpu").bernoulli(generator=generator)
    return heads[:channels].numpy() * 2 - 1


POWERS = [1 << power for power in range(10)]
"""Numbers of channels that may be rotated together."""


def channels_of(size: int) -> int:
    """Return the largest power of two up to 512 that divides a head size."""
    return max(power for power in POWERS if size % power == 0)


def in_rotations(rows: Rows) -> Rows:
    """Return rows cut into the channels that are rotated together."""
    size = rows.shape[-1]
    return rows.reshape(*rows.shape[:-1], size // channels_of(size), channels_of(size))


def sums_and_differences(rows: Rows) -> Rows:
    """Return the Walsh-Hadamard transform of rows: that of both halves, added and subtracted."""
    half = rows.shape[-1] // 2
    if not half:
        return rows
    one = sums_and_differences(rows[..., :half])
    other = sums_and_differences(rows[..., half:])
    return np.concatenate([one + other, one - other], -1)


def rounded(rows: Rows, dtype: torch.dtype) -> Rows:
    """Return float32 numbers rounded to a dtype, half to even, as float32."""
    if dtype == torch.float16:
        return rows.astype(np.float16).astype(np.float32)
    if dtype != torch.bfloat16:
        return rows
    high = rows.view(np.uint32) >> 16 << 16
    low, step = rows.view(np.uint32) - high, np.uint32(1 << 16)
    is_odd = (high >> 16) % 2 == 1
    up = (low > 1 << 15) | ((low == 1 << 15) & is_odd)
    found = np.where(up, high + step, high).view(np.float32)
    return np.where(np.isnan(rows), rows, found)


def four_bits(rows: Rows, dtype: torch.dtype, has_zero: bool) -> tuple[Rows, Rows]:
    """Return two levels per byte, and scales with the zero point in their last four bits."""
    blocks = in_rotations(rows)
    with np.errstate(invalid="ignore", over="ignore"):
        turned = sums_and_differences(blocks * signs(blocks.shape[-1]))
        turned = rounded(turned.reshape(rows.shape), dtype)
    is_lost = np.isnan(turned).all(-1)
    numbers = np.where(np.isnan(turned), np.nan, turned)
    numbers[is_lost] = 0
    low, high = np.nanmin(numbers, -1), np.nanmax(numbers, -1)
    if has_zero:
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    with np.errstate(invalid="ignore", over="ignore"):
        scales = np.fmax((high - low) / np.float32(15), np.float32(1e-6))
        zeros = nearest_level(-low / scales)
        inverse = np.float32(1) / scales
        levels = nearest_level(turned * inverse[..., None] + zeros[..., None])
    codes = levels.astype(np.uint8)
    bits = scales.view(np.uint32) // 16 * 16 + zeros.astype(np.uint32)
    return codes[..., ::2] + 16 * codes[..., 1::2], bits.view(np.float32)


def nearest_level(numbers: Rows) -> Rows:
    """Return numbers from 0 to 15, a half rounded up; 0 for NaN."""
    bounded = np.clip(np.nan_to_num(numbers, nan=0), np.float32(-1), np.float32(16))
    levels: Rows = np.floor(bounded + np.float32(0.5)).clip(0, 15)
    return levels


def int4_per_token_head(
    rows: Rows, scale: Any, dtype: torch.dtype
) -> tuple[Rows, Rows]:
    """Return codes and scales of levels that include 0; the scale is not read."""
    return four_bits(rows, dtype, has_zero=True)


def int4_per_token_head_vllm(
    rows: Rows, scale: Any, dtype: torch.dtype
) -> tuple[Rows, Rows]:
    """Return codes and scales of levels between the extremes; the scale is not read."""
    return four_bits(rows, dtype, has_zero=False)


RULES: dict[str, Rule] = {
    "int8_per_token_head": int8_per_token_head,
    "fp8_per_token_head": fp8_per_token_head,
    "int4_per_token_head": int4_per_token_head,
    "int4_per_token_head_vllm": int4_per_token_head_vllm,
}
"""The rule of each format with a scale per token and head."""


def encode_by_hand(
    form: CacheFormat, numbers: Tensor, scale: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """Return codes and scales of keys or values, on the host.

    Args:
        form: A format of RULES.
        numbers: [..., kv_heads, elements].
        scale: Optional. One number or [kv_heads]. If None, it is measured.

    Returns:
        [..., kv_heads, stored elements] codes; and [..., kv_heads] scales, None if they are given.
    """
    given = scale.cpu().numpy() if isinstance(scale, Tensor) else scale
    rows = numbers.cpu().float().numpy()
    codes, scales = RULES[form.name](rows, given, numbers.dtype)
    assert form.dtype is not None
    found = torch.from_numpy(codes).view(form.dtype)
    return found, torch.from_numpy(scales) if form.is_measured else None


def decode_by_hand(
    form: CacheFormat, codes: Tensor, scale: Tensor | float | None
) -> Tensor:
    """Return what keys or values in a cache stand for, exactly, in float64 on the host.

    Args:
        form: A format of RULES.
        codes: [..., kv_heads, stored elements].
        scale: One number, [kv_heads] or [..., kv_heads].
    """
    stored = codes.cpu()
    factor = torch.as_tensor(scale, dtype=torch.float32).cpu().numpy()
    if form.codes_per_element == 1:
        return stored.double() * torch.from_numpy(factor.astype(np.float64))[..., None]
    nibbles = np.stack([stored.numpy() % 16, stored.numpy() // 16], -1)
    levels = nibbles.reshape(*stored.shape[:-1], 2 * stored.shape[-1])
    bits = factor.view(np.uint32)
    zeros, scales = bits % 16, (bits - bits % 16).view(np.float32).astype(np.float64)
    blocks = in_rotations(levels - zeros[..., None].astype(np.float64))
    channels = blocks.shape[-1]
    turned = (sums_and_differences(blocks) * signs(channels)).reshape(levels.shape)
    return torch.from_numpy(turned * (scales / channels)[..., None])


def most_off(form: CacheFormat, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far finite keys or values of a format may be from what they were.

    It follows from the step of the format alone: half of it, for every code. A rotation of n
    channels makes rows sqrt(n) times longer and is undone, and a rotated row is rounded to its own
    dtype before.

    Args:
        form: A format with a scale per token and head.
        numbers: [..., kv_heads, elements].

    Returns:
        [..., kv_heads, elements] for each element, and [..., kv_heads] for the Euclidean norm of a
        row, in float64.
    """
    sizes = numbers.cpu().double().abs()
    scales = encode_by_hand(form, numbers, None)[1]
    assert scales is not None
    step = scales.double()[..., None]
    if form.name == "int8_per_token_head":
        by_element = (step / 2).expand_as(sizes)
    elif form.name == "fp8_per_token_head":
        # three bits after the first one; below 2^-6 of the scale steps are 2^-9 of it
        by_element = torch.maximum(sizes / 16, step * 2.0**-10)
    else:
        rotated = torch.finfo(numbers.dtype).eps * sizes.sum(-1, keepdim=True) / 2
        by_element = (step / 2 + rotated).expand_as(sizes)
        blocks = sizes.shape[-1] / channels_of(sizes.shape[-1])
        return by_element, by_element[..., 0] * blocks**0.5
    # the inverse of the scale and the quotient are rounded
    by_element = by_element * (1 + 2.0**-20) + sizes * 2.0**-22
    return by_element, by_element.square().sum(-1).sqrt()
