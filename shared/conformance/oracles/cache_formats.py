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


def int8_per_token_head(rows: Rows, scale: Any) -> tuple[Rows, Rows]:
    """Return codes and scales; the scale is not read."""
    sizes = np.where(np.isnan(rows), np.float32(0), np.abs(rows))
    scales = np.maximum(sizes.max(-1) / np.float32(127), np.float32(1e-6))
    with np.errstate(invalid="ignore"):
        quotients = rows * (np.float32(1) / scales)[..., None]
    is_number = np.isfinite(quotients)
    away = np.floor(np.abs(np.where(is_number, quotients, 0)) + np.float32(0.5))
    codes = np.where(is_number, np.copysign(away, quotients), -128)
    return codes.astype(np.int8), scales


RULES: dict[str, Rule] = {"int8_per_token_head": int8_per_token_head}
"""The rule of each format whose codes are not FP8 numbers."""


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
