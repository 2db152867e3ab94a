"""Tensors that a call is given, which must keep their memory, and those that it returns.

A kernel writes to the memory of an output. If it lets the tensor refer to other memory instead, the
caller's memory is not written. A tensor with attributes of its own that hide those of its class,
such as `cpu`, returns other elements than those in its memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class PassedTensors:
    """The memory of the tensors that a call is given.

    Args:
        args: The arguments of the call. Other types than `torch.Tensor` itself are left out.
        given: Optional. The arguments that are passed by name. If None, there are none.
    """

    def __init__(
        self, args: Iterable[Any], given: Mapping[str, Any] | None = None
    ) -> None:
        named = [(f"argument {place}", argument) for place, argument in enumerate(args)]
        self._before = [
            (name, argument, _place_of(argument))
            for name, argument in (*named, *(given or {}).items())
            if type(argument) is Tensor and not argument.is_meta
        ]

    def changed_by(self, found: Any) -> str:
        """Return what the call did that it must not do, in words, or nothing.

        Args:
            found: What it returned: a tensor, or several in a tuple, list or dictionary.
        """
        for name, tensor, place in self._before:
            if _place_of(tensor) != place:
                return f"it gave {name} other memory"
        results = [("a result", result) for result in _tensors_of(found)]
        every = [*((name, tensor) for name, tensor, _ in self._before), *results]
        for name, tensor in every:
            own = [
                attribute for attribute in vars(tensor) if hasattr(Tensor, attribute)
            ]
            if own:
                return f"it gave {name} its own {own[0]}"
        return ""


def _place_of(tensor: Tensor) -> tuple[Any, ...] | None:
    if tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _tensors_of(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from (value for value in found.values() if isinstance(value, Tensor))
    elif isinstance(found, (tuple, list)):
        yield from (value for value in found if isinstance(value, Tensor))
