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
from .latent_formats import E2M1, E4M3, meant, nearest

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
        exact = turned.reshape(rows.shape)
        turned = rounded(exact, dtype)
        if has_zero and dtype == torch.float16:
            turned = np.where(np.isinf(turned), exact, turned)
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


def in_blocks(rows: Rows) -> Rows:
    """Return rows cut into blocks of 16 channels."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // 16, 16)


def four_bit_floats(blocks: Rows, scale: float, largest: int) -> tuple[Rows, Rows]:
    """Return the codes of blocks, and their scales as bytes.

    Args:
        scale: The global scale.
        largest: What the largest size of a block becomes.
    """
    sizes = np.where(np.isnan(blocks), np.float32(0), np.abs(blocks)).max(-1)
    with np.errstate(all="ignore"):
        wanted = sizes / np.float32(largest) / np.float32(scale)
        scales = nearest(wanted, E4M3, of_nan=127, sign=128)
        steps = meant(scales, E4M3, 128).astype(np.float32) * np.float32(scale)
        codes = nearest(blocks / steps[..., None], E2M1, of_nan=7, sign=8)
    return np.where(steps[..., None] == 0, np.uint8(0), codes), scales


def squared_error(blocks: Rows, scale: float, codes: Rows, scales: Rows) -> Rows:
    """Return the sum of the squared errors of each block, divided by the global scale before."""
    found = meant(codes, E2M1, 8) * meant(scales, E4M3, 128)[..., None]
    with np.errstate(all="ignore"):
        off = blocks / np.float32(scale) - found.astype(np.float32)
        sums = np.where(np.isnan(off), np.float32(0), off) ** 2
        for count in (8, 4, 2, 1):
            pairs = sums.reshape(*sums.shape[:-1], count, 2)
            sums = pairs[..., 0] + pairs[..., 1]
    total: Rows = sums[..., 0]
    return total


def two_in_a_byte(codes: Rows) -> Rows:
    """Return the codes of blocks, the even channel in the low bits."""
    *shape, blocks, channels = codes.shape
    rows = codes.reshape(*shape, blocks * channels)
    pairs: Rows = rows[..., ::2] + 16 * rows[..., 1::2]
    return pairs


def nvfp4(rows: Rows, scale: Any, dtype: torch.dtype) -> tuple[Rows, Rows]:
    """Return codes and block scales; the scale is the global one."""
    codes, scales = four_bit_floats(in_blocks(rows), scale, 6)
    return two_in_a_byte(codes), scales


def nvfp4_4over6(rows: Rows, scale: Any, dtype: torch.dtype) -> tuple[Rows, Rows]:
    """Return codes and block scales, those of the largest code 4 where its error is smaller."""
    blocks = in_blocks(rows)
    six, four = (four_bit_floats(blocks, scale, largest) for largest in (6, 4))
    errors = [squared_error(blocks, scale, *one) for one in (six, four)]
    takes_four = errors[1] < errors[0]
    codes = np.where(takes_four[..., None], four[0], six[0])
    return two_in_a_byte(codes), np.where(takes_four, four[1], six[1])


RULES: dict[str, Rule] = {
    "int8_per_token_head": int8_per_token_head,
    "fp8_per_token_head": fp8_per_token_head,
    "int4_per_token_head": int4_per_token_head,
    "int4_per_token_head_vllm": int4_per_token_head_vllm,
    "nvfp4": nvfp4,
    "nvfp4_4over6": nvfp4_4over6,
}
"""The rule of each format whose scales are measured."""


def encode_by_hand(
    form: CacheFormat, numbers: Tensor, scale: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """Return codes and scales of keys or values, on the host.

    Args:
        form: A format of RULES.
        numbers: [..., kv_heads, elements].
        scale: Optional. One number or [kv_heads]; the global scale of block scales. If None, it is
            measured.

    Returns:
        [..., kv_heads, stored elements] codes; and [..., kv_heads] scales, or block scales
        [..., kv_heads, blocks] in the dtype of block scales. None if they are given.
    """
    given = scale.cpu().numpy() if isinstance(scale, Tensor) else scale
    rows = numbers.cpu().float().numpy()
    codes, scales = RULES[form.name](rows, given, numbers.dtype)
    assert form.dtype is not None
    found = torch.from_numpy(codes).view(form.dtype)
    if form.channels_per_scale:
        return found, torch.from_numpy(scales).view(form.scale_dtype)
    return found, torch.from_numpy(scales) if form.is_measured else None


def decode_by_hand(
    form: CacheFormat,
    codes: Tensor,
    scale: Tensor | float | None,
    global_scale: float | None = None,
) -> Tensor:
    """Return what keys or values in a cache stand for, exactly, in float64 on the host.

    Args:
        form: A format of RULES.
        codes: [..., kv_heads, stored elements].
        scale: One number, [kv_heads] or [..., kv_heads]; or block scales [..., kv_heads, blocks].
        global_scale: Optional. What block scales are multiplied by. If None, 1.
    """
    stored = codes.cpu()
    if form.channels_per_scale:
        assert isinstance(scale, Tensor)
        return decode_blocks(
            stored, scale, 1.0 if global_scale is None else global_scale
        )
    factor = torch.as_tensor(scale, dtype=torch.float32).cpu().numpy()
    if form.codes_per_element == 1:
        return stored.double() * torch.from_numpy(factor.astype(np.float64))[..., None]
    levels = halves_of(stored)
    bits = factor.view(np.uint32)
    zeros, scales = bits % 16, (bits - bits % 16).view(np.float32).astype(np.float64)
    blocks = in_rotations(levels - zeros[..., None].astype(np.float64))
    channels = blocks.shape[-1]
    turned = (sums_and_differences(blocks) * signs(channels)).reshape(levels.shape)
    return torch.from_numpy(turned * (scales / channels)[..., None])


def halves_of(stored: Tensor) -> Rows:
    """Return the two codes of each byte: [..., 2 * bytes]."""
    nibbles = np.stack([stored.numpy() % 16, stored.numpy() // 16], -1)
    return nibbles.reshape(*stored.shape[:-1], 2 * stored.shape[-1])


def decode_blocks(stored: Tensor, scale: Tensor, global_scale: float) -> Tensor:
    """Return codes times block scales times the global scale in float32, exactly."""
    blocks = in_blocks(meant(halves_of(stored), E2M1, 8))
    bytes_of_scales = scale.cpu().view(torch.uint8).numpy()
    numbers = blocks * meant(bytes_of_scales, E4M3, 128)[..., None]
    return torch.from_numpy(numbers * np.float64(np.float32(global_scale))).flatten(-2)


def most_off(
    form: CacheFormat, numbers: Tensor, global_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return how far finite keys or values of a format may be from what they were.

    It follows from the step of the format alone: half of it, for every code. A rotation of n
    channels makes rows sqrt(n) times longer and is undone, and a rotated row is rounded to its own
    dtype before.

    Args:
        form: A format whose scales are measured.
        numbers: [..., kv_heads, elements].
        global_scale: Optional. Of a format with block scales. If None, 1.

    Returns:
        [..., kv_heads, elements] for each element, and [..., kv_heads] for the Euclidean norm of a
        row, in float64.
    """
    sizes = numbers.cpu().double().abs()
    factor = 1.0 if global_scale is None else global_scale
    scales = encode_by_hand(form, numbers, factor)[1]
    assert scales is not None
    if form.channels_per_scale:
        steps = scales.double().repeat_interleave(form.channels_per_scale, -1) * factor
        # codes are 0.5, 1 and 2 apart, and end at 6
        half = torch.where(
            sizes < 2 * steps, 0.25, torch.where(sizes < 4 * steps, 0.5, 1)
        )
        by_element = torch.maximum(half * steps, sizes - 6 * steps)
        by_element = by_element * (1 + 2.0**-20) + sizes * 2.0**-22
        return by_element, by_element.square().sum(-1).sqrt()
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
