"""Cache formats by hand: the rule of each format, on arrays of float32 in NumPy.

A rule gets rows of numbers and a scale, and returns the codes and the scale of each row. It shares
no code with either twin.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...contract.cache_formats import CacheFormat

Rows: TypeAlias = np.ndarray[Any, Any]
Rule: TypeAlias = Callable[[Rows, Any], tuple[Rows, Any]]


def measured(rows: Rows, largest: int) -> tuple[Rows, Rows]:
    """Return rows divided by scales that make their largest size `largest`, and the scales."""
    sizes = np.where(np.isnan(rows), np.float32(0), np.abs(rows))
    scales = np.maximum(sizes.max(-1) / np.float32(largest), np.float32(1e-6))
    with np.errstate(invalid="ignore"):
        return rows * (np.float32(1) / scales)[..., None], scales


def int8_per_token_head(rows: Rows, scale: Any) -> tuple[Rows, Rows]:
    """Return codes and scales; the scale is not read."""
    quotients, scales = measured(rows, 127)
    is_number = np.isfinite(quotients)
    away = np.floor(np.abs(np.where(is_number, quotients, 0)) + np.float32(0.5))
    codes = np.where(is_number, np.copysign(away, quotients), -128)
    return codes.astype(np.int8), scales


def fp8_per_token_head(rows: Rows, scale: Any) -> tuple[Rows, Rows]:
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


RULES: dict[str, Rule] = {
    "int8_per_token_head": int8_per_token_head,
    "fp8_per_token_head": fp8_per_token_head,
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
        [..., kv_heads, elements] codes; and [..., kv_heads] scales, None if they are given.
    """
    given = scale.cpu().numpy() if isinstance(scale, Tensor) else scale
    codes, scales = RULES[form.name](numbers.cpu().float().numpy(), given)
    assert form.dtype is not None
    found = torch.from_numpy(codes).view(form.dtype)
    return found, torch.from_numpy(scales) if form.is_measured else None
