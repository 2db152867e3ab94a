"""What did a call write to?

A view says what a call may touch; the memory around it is somebody else's. So whole allocations are
compared: what had to change, and every byte beside it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .expect import Disagreement, expect_refusal, expect_same


def memory_of(tensor: Tensor) -> Tensor:
    """Return [bytes] uint8: the whole allocation that a tensor is a view of."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage())


def copy_of(tensor: Tensor) -> Tensor:
    """Return the same view of a copy of the whole allocation, on the host."""
    elements = memory_of(tensor).cpu().clone().view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def packed(tensor: Tensor) -> Tensor:
    """Return a copy on the host whose elements lie one behind the other.

    `contiguous` keeps the strides of axes of one entry, and then bytes cannot be seen.
    """
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def expect_memory(what: str, found: Tensor, right: Tensor) -> None:
    """Refuse a view that holds something else, or bytes around it that changed.

    Args:
        what: the view in question.
        found: as it is now.
        right: as it should be, from `copy_of`.
    """
    expect_same(what, packed(found), packed(right))
    expect_same(f"memory around {what}", memory_of(found), memory_of(right))


@contextmanager
def kept(**tensors: Tensor) -> Iterator[None]:
    """Refuse a change of any of these tensors, or of the memory around them."""
    before = {name: copy_of(tensor) for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        expect_memory(f"{name}, which is only read", tensor, before[name])


def expect_own_memory(what: str, found: Tensor, **inputs: Tensor) -> None:
    """Refuse an answer that lies in the memory of an input: the next change would change it."""
    for name, tensor in inputs.items():
        own, other = found.untyped_storage(), tensor.untyped_storage()
        if found.numel() and own.data_ptr() == other.data_ptr():
            raise Disagreement(
                what, "as a whole", f"a view of {name}", "its own memory"
            )


@contextmanager
def checked_values() -> Iterator[None]:
    """Let kernels that look at values only if they are asked to (PAGETWIN_CHECK_VALUES=1) do so."""
    name = "PAGETWIN_CHECK_VALUES"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def expect_all_refused(what: str, call: Callable[[], Any], **tensors: Tensor) -> None:
    """Refuse a call that returns, or that changes memory before it raises.

    Args:
        what: the input, in words.
        call: what must raise.
        tensors: what it could have written to.
    """
    with kept(**tensors), checked_values():
        expect_refusal(what, call)
