"""Arguments of a launch in the Gluon interpreter: tensors, tensor maps, numbers, groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .asynchronous import TensorMap
from .values import GLUON_DTYPES, InterpreterError, Memory, Pointer, lift


def to_argument(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a launch argument as the kernel receives it.

    Args:
        value: a tensor, a tensor descriptor, a number, None, or a NamedTuple of them.
        tensors: the tensors of the launch, one of which has the address of a descriptor.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_argument(field, tensors) for field in value))
    if isinstance(value, torch.Tensor):
        return Pointer(Memory(value), 0)
    if hasattr(value, "block_shape"):
        return _tensor_map(value, tensors)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return lift(value)
    return value


def _tensor_map(descriptor: Any, tensors: Sequence[torch.Tensor]) -> TensorMap:
    """Return the tensor map of a descriptor, whose elements must be those of one tensor."""
    address, dtype = descriptor.base.data_ptr(), descriptor.base.dtype
    pairs = list(zip(descriptor.shape, descriptor.strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    own = [descriptor.base] if isinstance(descriptor.base, torch.Tensor) else []
    for tensor in [*tensors, *own]:
        storage = tensor.untyped_storage()
        begin = address - storage.data_ptr()
        if begin >= 0 and begin + span * dtype.itemsize <= storage.nbytes():
            flat = torch.empty(0, dtype=dtype).set_(storage)
            return TensorMap(
                flat[begin // dtype.itemsize :],
                GLUON_DTYPES[dtype],
                descriptor.shape,
                descriptor.strides,
                descriptor.block_shape,
                descriptor.layout,
                getattr(descriptor, "true_box", None),
                torch.nan if getattr(descriptor, "padding", "") == "nan" else 0.0,
            )
    raise InterpreterError(
        f"a tensor map of {descriptor.shape} with steps of {descriptor.strides} reaches outside"
        " the tensors of the launch",
        "out of bounds",
    )
