"""The state of an object: all that it holds, for a comparison before and after a call."""

from collections import deque
from collections.abc import Mapping, Set
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .canaries import memory_of

WHOLE = (
    *(type(None), bool, int, float, complex, str, bytes, slice, type, Enum),
    *(torch.dtype, torch.device, np.generic, np.dtype),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)
"""Values that are compared as they are."""


def state_of(
    value: Any, names: tuple[str, ...] | None = None, whole: bool = False
) -> Any:
    """Return what an object holds, down to the bytes of its tensors.

    Args:
        value: the object.
        names: Optional. Attributes that are left out, wherever they are. If None, all are compared.
        whole: Whether the allocations are compared of which tensors are views.

    Returns:
        Nested tuples that are equal if and only if the states are. An object that is met again is
        its number, so that it matters which objects are shared.
    """
    memories: dict[int, int] | None = {} if whole else None
    return _state(value, {}, [], frozenset(names or ()), memories)


def _state(
    value: Any,
    numbers: dict[int, int],
    kept: list[Any],
    left_out: frozenset[str],
    memories: dict[int, int] | None,
) -> Any:
    if isinstance(value, WHOLE):
        return repr(value) if isinstance(value, (float, complex, slice)) else value
    if id(value) in numbers:
        return "again", numbers[id(value)]
    numbers[id(value)] = len(numbers)
    # an object that is freed would give its id to another one
    kept.append(value)

    def inner(part: Any) -> Any:
        return _state(part, numbers, kept, left_out, memories)

    kind: tuple[Any, ...] = (type(value),)
    if isinstance(value, Tensor):
        if value.is_meta:
            return (*kind, value.dtype, tuple(value.shape))
        if memories is not None:
            return (*kind, value.dtype, *_view_of(value, memories))
        octets = value.detach().cpu().contiguous().view(-1)
        # an axis of one element may have any stride, and a view as bytes needs 1
        octets = octets.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return (*kind, value.dtype, tuple(value.shape), octets.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return (*kind, value.dtype, value.shape, value.tobytes())
    if isinstance(value, Mapping):
        kind += tuple((inner(key), inner(part)) for key, part in value.items())
    elif isinstance(value, (list, tuple, deque)):
        kind += tuple(inner(part) for part in value)
    elif isinstance(value, Set):
        kind += tuple(inner(part) for part in sorted(value, key=repr))
    slots = [
        name
        for base in type(value).__mro__
        for name in getattr(base, "__slots__", ())
        if hasattr(value, name)
    ]
    parts = {name: getattr(value, name) for name in slots} | getattr(
        value, "__dict__", {}
    )
    return kind + tuple(
        (name, inner(part)) for name, part in parts.items() if name not in left_out
    )


def _view_of(tensor: Tensor, memories: dict[int, int]) -> tuple[Any, ...]:
    """Return the view that a tensor is, and the bytes of its allocation if it is a new one.

    Args:
        tensor: the tensor.
        memories: the number of each allocation by address, modified in place.
    """
    address = tensor.untyped_storage().data_ptr()
    view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if address in memories:
        return *view, "again", memories[address]
    memories[address] = len(memories)
    return *view, memory_of(tensor).cpu().numpy().tobytes()
