"""A second device without hardware: tensors on "meta" that hold numbers on the host.

Operations compute on the host. One that mixes devices raises, as on a GPU, and what would make the
host wait for a GPU is counted: a number that is read, and a copy to the host.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
HOST = torch.device("cpu")
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
"""Operations whose result the host has to know."""


class OnDevice(Tensor):
    """A tensor of the second device.

    Args:
        numbers: What it holds, on the host.
    """

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "OnDevice":
        """Return a tensor of the same shape, strides and dtype as some numbers."""
        found: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        found.numbers = numbers
        return found

    def tolist(self) -> Any:
        """Return the numbers as Python objects: one copy to the host."""
        return self.to(HOST).tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.numbers})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: every operation has to run inside of a `SecondDevice`."""
        raise RuntimeError(f"{function} outside of a SecondDevice")


def held(value: Any) -> Any:
    """Return the numbers of a tensor of the second device; any other value as it is."""
    return value.numbers if isinstance(value, OnDevice) else value


class SecondDevice(TorchDispatchMode):
    """Runs operations on tensors of both devices, and counts reads of the host.

    Attributes:
        reads: The operations that the host waits for, and how often each was called.
        copies: Number of copies from the host to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the host, and return its result on the device of its inputs."""
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_flatten((args, kwargs))[0]]
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        name = str(function).rpartition(".")[0]
        target = kwargs.get("device")
        self._check(name, tensors, ours)
        if target is not None:
            kwargs["device"] = HOST
        lies_here = target == DEVICE if target is not None else bool(ours)
        if ours and (name in READS or not lies_here):
            self.reads[name] += 1
        self.copies += (
            name == "aten._to_copy" and lies_here and len(ours) < len(tensors)
        )
        found = function(*tree_map(held, args), **tree_map(held, kwargs))
        by_id = {id(held(tensor)): tensor for tensor in tensors}

        def wrapped(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            if id(result) in by_id:  # an operation in place returns its own argument
                return by_id[id(result)]
            return OnDevice(result) if lies_here else result

        return tree_map(wrapped, found)

    def _check(self, name: str, tensors: list[Tensor], ours: list[Tensor]) -> None:
        """Raise if an operation mixes devices: a GPU takes single numbers of the host alone."""
        others = [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
        if not ours or name == "aten.copy_":
            return
        if wrong := [tuple(other.shape) for other in others if other.dim()]:
            raise RuntimeError(f"{name} mixes devices: {wrong} on the host")
