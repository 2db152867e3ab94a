"""Memory that tensors share: results that overlap themselves, each other, or what is read.

Two views of one page may have alternating bytes and share none of them, as the codes and scales of
vLLM's pages do. So addresses are compared axis by axis, and not as ranges alone.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

Axes: TypeAlias = tuple[tuple[int, int], ...]
"""Stride in bytes and largest index of each axis, in descending order of strides."""
Span: TypeAlias = tuple[str, Tensor, int, int]
"""Name of an argument, the tensor, and the addresses of its begin and its end."""

_PLAIN = (Tensor, torch.nn.Parameter)

MOST_STEPS = 64
"""Distances that are tried per axis. Views of one page have at most two."""


def check_own_memory(**written: Tensor | None) -> None:
    """Raise if tensors that are written share memory with themselves or with each other.

    Raises:
        ValueError: Two elements have one address.
    """
    check_results_apart(written, {})


def check_results_apart(
    written: Mapping[str, Tensor | None],
    read: Mapping[str, Tensor | None],
    in_place: bool = False,
) -> None:
    """Raise if results share memory with themselves, with each other, or with what is read.

    Args:
        written: The results, by the names of their arguments.
        read: Tensors that are read while the results are written.
        in_place: Whether a result may be one of them, since each element is read before it is
            written.

    Raises:
        ValueError: Two elements have one address.
    """
    if is_compiling():
        # tensors of a tracer have no addresses
        return
    results: list[Span] = []
    for name, tensor in written.items():
        if tensor is None or _has_no_address(tensor):
            continue
        if not tensor.is_contiguous() and overlaps_itself(tensor):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}:"
                " expected memory of its own for each element, since it is written; an expanded"
                " tensor has none"
            )
        span = _span(name, tensor)
        for result in results:
            _reject_shared(result, span)
        results.append(span)
    if not results:
        return
    for name, tensor in read.items():
        if tensor is None or _has_no_address(tensor):
            continue
        span = _span(name, tensor)
        for result in results:
            if not (in_place and is_same_view(result[1], tensor)):
                _reject_shared(result, span)


def _has_no_address(tensor: Tensor) -> bool:
    return type(tensor) not in _PLAIN or tensor.is_meta or not tensor.numel()


def _span(name: str, tensor: Tensor) -> Span:
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return name, tensor, begin, begin + tensor.nbytes
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return name, tensor, begin, begin + (last + 1) * tensor.itemsize


def _reject_shared(result: Span, other: Span) -> None:
    name, tensor, begin, end = result
    if begin < other[3] and other[2] < end and share_memory(tensor, other[1]):
        raise ValueError(
            f"{name} and {other[0]} share memory: expected memory of its own for {name}, since it"
            " is written; give a new tensor"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor have one address.

    Example:
        >>> overlaps_itself(torch.zeros(1, 4).expand(3, 4))
        True
        >>> overlaps_itself(torch.zeros(3, 4).T)
        False
    """
    axes, reach = _axes(tensor), tensor.itemsize
    for stride, last in reversed(axes):
        if stride < reach:
            break
        reach += stride * last
    else:
        return False
    # two elements differ in one axis at least; the rest of their indices is free
    width = tensor.itemsize
    return any(
        _meet(axes[:at] + axes[at + 1 :], _cut(axes, at), stride, width, width)
        for at, (stride, _) in enumerate(axes)
    )


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have an element at one address.

    Example:
        Alternating elements of one tensor.

        >>> memory = torch.zeros(8)
        >>> share_memory(memory[::2], memory[1::2])
        False
        >>> share_memory(memory[::2], memory[4:])
        True
    """
    apart = other.data_ptr() - one.data_ptr()
    return _meet(_axes(one), _axes(other), apart, one.itemsize, other.itemsize)


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements in the same order."""
    if one is other:
        return True
    if is_compiling() or _has_no_address(one) or _has_no_address(other):
        return False
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.data_ptr() == other.data_ptr()
    )


def _axes(tensor: Tensor) -> Axes:
    """Return strides and largest indices of the axes with more than one entry."""
    width = tensor.itemsize
    return tuple(
        sorted(
            (
                (stride * width, size - 1)
                for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
                if size > 1
            ),
            reverse=True,
        )
    )


def _cut(axes: Axes, at: int) -> Axes:
    """Return the axes, of which one has an entry less."""
    stride, last = axes[at]
    shorter = ((stride, last - 1),) if last > 1 else ()
    return axes[:at] + shorter + axes[at + 1 :]


def _meet(one: Axes, other: Axes, apart: int, width: int, other_width: int) -> bool:
    """Return whether elements of two tensors have a byte in common.

    The largest stride is taken from both, and the rest is compared at each distance that such steps
    may leave between them.

    Args:
        one, other: Axes of both.
        apart: Bytes from the first element of one to that of the other.
        width, other_width: Bytes of an element.
    """
    if not 0 - _reach(other, other_width) < apart < _reach(one, width):
        return False
    if not one and not other:
        return True
    stride = max(axes[0][0] for axes in (one, other) if axes)
    if not stride:
        return True
    (back, one), (ahead, other) = _without(one, stride), _without(other, stride)
    # steps for which the rest may meet: -reach of other < apart + step * stride < reach of one
    first = max(-back, (-_reach(other, other_width) - apart) // stride + 1)
    last = min(ahead, (_reach(one, width) - apart - 1) // stride)
    if last - first >= MOST_STEPS:
        return True
    return any(
        _meet(one, other, apart + step * stride, width, other_width)
        for step in range(first, last + 1)
    )


def _without(axes: Axes, stride: int) -> tuple[int, Axes]:
    """Return the largest number of steps of this stride, and the other axes."""
    count = sum(last for step, last in axes if step == stride)
    return count, tuple(axis for axis in axes if axis[0] != stride)


def _reach(axes: Axes, width: int) -> int:
    """Return the bytes from the first element to the end of the last one."""
    return width + sum(stride * last for stride, last in axes)
