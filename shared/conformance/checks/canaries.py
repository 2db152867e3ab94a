"""Checks of the memory that a call writes: no byte outside of its output may change.

A call may write only the elements of the view that it is given. The checks compare whole
allocations: the elements that had to change, and all other bytes, which had not.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .expect import Disagreement, expect_rejection, expect_same


def memory_of(tensor: Tensor) -> Tensor:
    """Return [bytes] uint8, the whole allocation of which a tensor is a view."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage())


def copy_of(tensor: Tensor) -> Tensor:
    """Return the same view of a copy of the whole allocation, on the host."""
    elements = memory_of(tensor).cpu().clone().view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def packed(tensor: Tensor) -> Tensor:
    """Return a packed copy on the host.

    `contiguous` keeps the strides of axes of size 1, and such a tensor cannot be viewed as bytes.
    """
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def expect_memory(what: str, found: Tensor, right: Tensor) -> None:
    """Raise a Disagreement if a view or the memory around it differs from the expected one.

    Args:
        what: The view, in words.
        found: The view now.
        right: The expected view, from `copy_of`.
    """
    expect_same(what, packed(found), packed(right))
    expect_same(f"memory around {what}", memory_of(found), memory_of(right))


@contextmanager
def kept(**tensors: Tensor) -> Iterator[None]:
    """Raise a Disagreement if any of these tensors changes, or the memory around it."""
    before = {name: copy_of(tensor) for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        expect_memory(f"{name}, which is only read", tensor, before[name])


def expect_own_memory(what: str, found: Tensor, **inputs: Tensor) -> None:
    """Raise a Disagreement if a result shares memory with an input."""
    for name, tensor in inputs.items():
        own, other = found.untyped_storage(), tensor.untyped_storage()
        if found.numel() and own.data_ptr() == other.data_ptr():
            raise Disagreement(
                what, "as a whole", f"a view of {name}", "its own memory"
            )


@contextmanager
def checked_values() -> Iterator[None]:
    """Set PAGETWIN_CHECK_VALUES=1, which enables the validation of tensor contents."""
    name = "PAGETWIN_CHECK_VALUES"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def expect_rejection_without_writes(
    what: str, call: Callable[[], Any], **tensors: Tensor
) -> None:
    """Raise a Disagreement if a call returns, or changes memory before it raises.

    Args:
        what: The input, in words.
        call: The call that must raise.
        tensors: The tensors that the call must leave unchanged.
    """
    with kept(**tensors), checked_values():
        expect_rejection(what, call)


MOST_BYTES = 1 << 30
"""Bytes of memory that is copied before each call. Laws of addresses of 64 bits have more."""


@contextmanager
def unchanged(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Raise a Disagreement if a call changes an argument, from which the right result follows.

    Args:
        arguments: Of the call, by name. Memory of more than MOST_BYTES is not compared.
    """
    kept: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            memory = memory_of(tensor)
            is_new = memory.data_ptr() not in kept
            if is_new and 0 < memory.numel() <= MOST_BYTES:
                kept[memory.data_ptr()] = name, memory, memory.clone()
    yield
    for name, memory, before in kept.values():
        if not torch.equal(memory, before):
            expect_same(f"memory of {name}, which is only read", memory, before.cpu())
