"""Validation of single numbers and tensors."""

import os
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..contract.checks import check_not_negative as check_not_negative
from ..contract.checks import check_positive as check_positive
from ..contract.kinds import CACHE_DTYPES

FLOATS = (*CACHE_DTYPES, torch.float64)


# os.environ encodes and decodes at each access, which takes 0.7 us; its own dictionary takes 0.1
_ENVIRONMENT: Any = getattr(os.environ, "_data", None)
_CHECK_VALUES: Any = os.environ.encodekey("PAGETWIN_CHECK_VALUES")
_ON: Any = os.environ.encodevalue("1")
_OFF: Any = os.environ.encodevalue("0")
_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that hold numbers; those of a tracer do not."""


def values_checked(where: Tensor | torch.device) -> bool:
    """Return whether the optimized twin validates contents too, which reads tensors.

    `PAGETWIN_CHECK_VALUES=1` enables it on every device, and 0 disables it. If it is not set,
    contents are validated on the CPU, where nothing has to be waited for. Nothing is read while a
    compiler traces.

    Args:
        where: a tensor of the call, or its device.

    Raises:
        ValueError: the variable has another value.
    """
    if is_compiling():
        return False
    if _ENVIRONMENT is None:
        given = os.environ.get("PAGETWIN_CHECK_VALUES")
        setting: Any = None if given is None else os.environ.encodevalue(given)
    else:
        setting = _ENVIRONMENT.get(_CHECK_VALUES)
    if setting in (_ON, _OFF):
        return bool(setting == _ON)
    if setting:
        given = os.environ["PAGETWIN_CHECK_VALUES"]
        raise ValueError(
            f"PAGETWIN_CHECK_VALUES = {given!r}: expected 1, 0, or nothing for contents on the CPU"
        )
    if isinstance(where, torch.device):
        return where.type == "cpu"
    return where.is_cpu and type(where) in _PLAIN


def values_may_be_checked() -> bool:
    """Return whether contents on a GPU may have to be validated; `values_checked` decides."""
    if _ENVIRONMENT is None:
        return os.environ.get("PAGETWIN_CHECK_VALUES") not in (None, "0")
    setting = _ENVIRONMENT.get(_CHECK_VALUES)
    return setting is not None and setting != _OFF


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


def check_on_host(name: str, tensor: Tensor) -> None:
    """Raise an error for a tensor on a device, which the host would have to wait for."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is on {tensor.device}: expected cpu; move it there first"
        )


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
