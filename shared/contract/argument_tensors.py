"""Tensors that the operations do not take: those with gradients, and those without plain memory."""

from typing import Any

import torch
from torch import Tensor

_is_transformed: Any = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None
)
_INPUT_ERRORS = (ValueError, IndexError, TypeError, NotImplementedError, KeyError)


def reject_gradients(**arguments: Any) -> None:
    """Raise NotImplementedError for a tensor that requires a gradient, in grad mode.

    The twins have no backward pass. Autograd would record the reference's torch calls, and a cache
    that is written would become a part of the graph.
    """
    for name, value in arguments.items():
        if (
            isinstance(value, Tensor)
            and value.requires_grad
            and torch.is_grad_enabled()
        ):
            raise NotImplementedError(
                f"{name} requires a gradient: expected none, as the twins have no backward"
                f" pass; call it under torch.no_grad(), or pass {name}.detach()"
            )


def explain_tensors(error: Exception, **arguments: Any) -> None:
    """Raise one sentence about an argument without plain memory, if it may have caused an error.

    It is called after a call has failed, so that calls that are right pay nothing.

    Args:
        error: what the call raised.
        arguments: of the call, by name.

    Raises:
        NotImplementedError: an argument is nested, sparse, quantized or inside a transform of
            `torch.func`; or it has no contents, and the error is not about the input.
    """
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or not (what := describe_memory(value)):
            continue
        if what != _META or not isinstance(error, _INPUT_ERRORS):
            raise NotImplementedError(
                f"{name} is {what}: expected a tensor with strides and memory of its own"
            ) from error


_META = "a meta tensor, without contents"


def describe_memory(tensor: Tensor) -> str:
    """Return what a tensor has instead of plain memory; empty if it has plain memory."""
    if _is_transformed is not None and _is_transformed(tensor):
        return "inside a transform of torch.func, such as vmap"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_quantized:
        return "a quantized tensor"
    return _META if tensor.is_meta else ""
