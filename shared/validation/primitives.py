"""Validation of single numbers and tensors."""

import os
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor

from ..contract.checks import check_not_negative as check_not_negative
from ..contract.checks import check_positive as check_positive
from ..contract.kinds import CACHE_DTYPES

FLOATS = (*CACHE_DTYPES, torch.float64)


# os.environ encodes and decodes at each access, which takes 0.7 us; its own dictionary takes 0.1
_ENVIRONMENT: Any = getattr(os.environ, "_data", None)
_CHECK_VALUES: Any = os.environ.encodekey("PAGETWIN_CHECK_VALUES")
_ON: Any = os.environ.encodevalue("1")


def values_checked() -> bool:
    """Return whether the optimized twin validates contents too: PAGETWIN_CHECK_VALUES=1."""
    if _ENVIRONMENT is None:
        return os.environ.get("PAGETWIN_CHECK_VALUES") == "1"
    found: bool = _ENVIRONMENT.get(_CHECK_VALUES) == _ON
    return found


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


def check_field_names(names: Sequence[str]) -> None:
    """Raise an error for names that a dataclass cannot have as fields."""
    for number, name in enumerate(names):
        if not name.isidentifier() or iskeyword(name):
            raise ValueError(
                f"fields[{number}] = {name!r}: expected a Python identifier"
            )
        if name in names[:number]:
            raise ValueError(f"fields[{number}] = {name!r}: is given twice")
