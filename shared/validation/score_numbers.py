"""Validation of numbers that scores are computed from, which are float32 in kernels."""

import math

import torch
from torch import Tensor

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, 1e30
"""Bounds of a scale and a cap. Below is 0 or subnormal in float32. Above, scores overflow."""
LARGEST_SCORE = 1e38
"""Kernels multiply scores by log2(e), which may not overflow float32 either."""
LARGEST_SLOPE = 1e28
"""A slope times a distance of 2**31 is a score."""


def is_score_scale(scale: float | None) -> bool:
    """Return whether the scale of the scores is None, 0, or a number that float32 has."""
    return scale is None or scale == 0 or SMALLEST <= abs(scale) <= LARGEST


def check_score_scale(scale: float | None) -> None:
    """Raise if `is_score_scale` is False."""
    if is_score_scale(scale):
        return
    raise ValueError(
        f"scale = {scale}: expected 0 or a number of size {SMALLEST:.3g} to {LARGEST:.0e}, or"
        " None for head_size**-0.5"
    )


def check_soft_cap(logits_soft_cap: float) -> None:
    """Raise if the cap is not a number above 0 that float32 has."""
    if not SMALLEST <= logits_soft_cap <= LARGEST:
        raise ValueError(
            f"logits_soft_cap = {logits_soft_cap}: expected a number above 0 that float32"
            f" has ({SMALLEST:.3g} to {LARGEST:.0e}), or None for no cap"
        )


def check_score_numbers(
    name: str,
    numbers: Tensor,
    largest: float,
    takes_masks: bool,
    takes_nan: bool = False,
) -> None:
    """Raise if an element of a tensor is NaN or too large.

    Args:
        name: Name of the argument.
        numbers: [heads] or [heads, entries].
        largest: The largest size of an element.
        takes_masks: Whether -inf is accepted, which takes no weight.
        takes_nan: Whether NaN is accepted, because not all elements are read.
    """
    is_right = numbers.abs() <= largest
    if takes_masks:
        is_right |= numbers == -math.inf
    if takes_nan:
        is_right |= numbers.isnan()
    if bool(is_right.all()):
        return
    index = (~is_right).nonzero()[0].tolist()
    found = numbers[tuple(index)].item()
    mask = ", or -inf for no weight" if takes_masks else ""
    raise ValueError(
        f"{name}{index} = {found}: expected a number of size up to {largest:.0e}{mask}"
    )
