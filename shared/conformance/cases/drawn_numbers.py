"""Normal numbers that are drawn once per process, and the copies and indices of ragged rows."""

from collections.abc import Mapping
from ctypes import memmove
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUMBERS = 4_194_301
"""Normal numbers of a process. It is a prime number: if a batch takes more and they repeat, no two
keys are equal."""
CPU = torch.device("cpu")
ALIGNMENT = 512
"""Tensors that are copied to a device together begin at multiples of so many bytes, as those that
torch allocates on a GPU do."""
GARBAGE_BYTE = 0x7F
"""What the memory after each of them holds: integers that are far outside of every range."""
Ints = NDArray[np.int64]


@cache
def normal_numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [NUMBERS] normal numbers, the same on each device."""
    if device != CPU or dtype != torch.float32:
        return normal_numbers(torch.float32, CPU).to(dtype).to(device)
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))


class Numbers:
    """Takes normal numbers one after another, the first again after the last.

    Args:
        first: Index of the first number.
        device: Where the numbers are taken.
    """

    def __init__(self, first: int, device: torch.device) -> None:
        self.first, self.device = first, device

    def take(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the next numbers. They are not to be modified: they are not copied."""
        numbers = normal_numbers(dtype, device or self.device)
        first, count = self.first, prod(shape)
        self.first = (first + count) % NUMBERS
        if first + count <= NUMBERS:
            return numbers.narrow(0, first, count).view(shape)
        times, rest = divmod(first + count - NUMBERS, NUMBERS)
        parts = [numbers[first:], *[numbers] * times, numbers[:rest]]
        return torch.cat(parts).view(shape)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device."""
    return moved(torch.from_numpy(array), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without waiting for it."""
    return tensor.to(device, non_blocking=True)


def moved_together(
    tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return packed tensors of the host on a device, in one copy that nothing waits for.

    A copy of its own for each of them takes longer, and CUDA may wait for the device before it
    copies memory that is not pinned. The tensors are views of one allocation, with at least one
    byte of garbage after each.
    """
    packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
    begins, end = [], 0
    for tensor in packed.values():
        begins.append(end)
        end += (tensor.nbytes // ALIGNMENT + 1) * ALIGNMENT
    is_pinned = device.type == "cuda"
    memory = torch.empty(end, dtype=torch.uint8, pin_memory=is_pinned)
    memory.fill_(GARBAGE_BYTE)
    first = memory.data_ptr()
    for begin, tensor in zip(begins, packed.values(), strict=True):
        # two operations of torch per tensor would take longer
        memmove(first + begin, tensor.data_ptr(), tensor.nbytes)
    there = moved(memory, device)
    whole = {dtype: there.view(dtype) for dtype in {v.dtype for v in packed.values()}}
    return {
        name: whole[tensor.dtype].as_strided(
            tensor.shape, tensor.stride(), begin // tensor.dtype.itemsize
        )
        for begin, (name, tensor) in zip(begins, packed.items(), strict=True)
    }


def rows_of(lens: Ints) -> tuple[Ints, Ints]:
    """Return for each row of ragged requests its request, and its index in the request."""
    request = np.repeat(np.arange(len(lens)), lens)
    starts = np.cumsum(lens) - lens
    return request, np.arange(len(request)) - starts[request]


def bits(tensor: Tensor) -> Tensor:
    """Return FP8 numbers as bytes, because torch cannot index them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
