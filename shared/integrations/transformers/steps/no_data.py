"""Tensors that have a shape and no data: keys in pages, and the mask of a step.

The code of a model passes such a tensor on to the attention function, which knows where the data
is. Any other computation with it raises an error, instead of a result without meaning.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

SHAPE_QUERIES = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
    # what torch.compile asks of every tensor
    Tensor.is_nested.__get__,  # type: ignore[attr-defined]
    Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
    Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    Tensor.is_mkldnn.__get__,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.grad.__get__,  # type: ignore[union-attr]
    Tensor._base.__get__,  # type: ignore[union-attr]
    Tensor._is_view,
    Tensor.is_conj,
    Tensor.is_neg,
    Tensor.stride,
    Tensor.storage_offset,
    Tensor.untyped_storage,
}
"""Tensor functions that need no data."""


class TensorWithoutData(Tensor):
    """A tensor of which only the shape, dtype and device are known."""

    @classmethod
    def reject(cls, operation: str) -> NoReturn:
        """Raise for a computation that needs data."""
        raise NotImplementedError(f"{operation} of a {cls.__name__}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run functions that need only the shape; raise for all others."""
        if func is Tensor.__repr__:
            return f"{cls.__name__}()"
        if func not in SHAPE_QUERIES:
            cls.reject(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
