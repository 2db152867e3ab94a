"""Validation of single numbers and tensors."""

import os

import torch
from torch import Tensor

from ..contract.checks import check_not_negative as check_not_negative
from ..contract.checks import check_positive as check_positive
from ..contract.kinds import CACHE_DTYPES

FLOATS = (*CACHE_DTYPES, torch.float64)


def values_checked() -> bool:
    """Return whether the optimized twin validates contents too: PAGETWIN_CHECK_VALUES=1."""
    return os.environ.get("PAGETWIN_CHECK_VALUES") == "1"


def check_length(name: str, tensor: Tensor, expected: int, what: str) -> None:
    """Raise an error for a vector that does not have the expected length."""
    if tensor.dim() != 1 or tensor.shape[0] != expected:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}: expected [{expected}] ({what})"
        )


def check_dtype(name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    """Raise an error for a tensor of another dtype."""
    if tensor.dtype not in expected:
        names = " or ".join(str(dtype) for dtype in expected)
        raise TypeError(f"{name} is {tensor.dtype}: expected {names}")


def check_same_device(**tensors: Tensor | None) -> None:
    """Raise an error for tensors that are not all on the first one's device."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, leader = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.device != leader.device:
            raise ValueError(
                f"{name} is on {tensor.device}: expected {leader.device}, where {first}"
                f" is; move it there first"
            )
