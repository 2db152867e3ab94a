"""Guard pages: memory after which the next byte must not be accessed, on a CPU or a CUDA device.

A kernel that reads past the end of a tensor usually reads other memory of its process. A guard page
makes that read an error: a segmentation fault on a CPU, an illegal memory access on a CUDA device.
Both end the worker process, and the law is reported as crashed on that input.

On a CPU the page is protected (`mprotect`), which Windows does otherwise: laws that need it are
not tried there. On a CUDA device addresses are reserved for the memory and its guard, and only the
memory is mapped (`cuMemAddressReserve`, `cuMemMap` of the driver).
"""

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.support import OutsideSupport

PAGE = mmap.PAGESIZE
CAN_PROTECT = os.name != "nt"
"""Whether the system has `mprotect`."""
TYPES = {torch.uint8: "|u1", torch.int32: "<i4", torch.int64: "<i8"}
"""Element types of guarded rows, as the array interface spells them."""


def guarded(tensor: Tensor) -> Tensor:
    """Return a contiguous copy after whose last byte comes a guard page.

    A read or write there ends the process.

    Args:
        tensor: Any tensor on a CPU or a CUDA device. One on another device, or without elements,
            is returned as it is.

    Raises:
        OSError: The system does not protect the page.
        OutsideSupport: The tensor is on a CPU, and the system is Windows.
        RuntimeError: The CUDA driver reports an error.
    """
    if tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
        return tensor
    num_bytes = tensor.numel() * tensor.element_size()
    memory = _bytes_before_guards(num_bytes, 1, tensor.device)
    copy = memory[memory.numel() - num_bytes :].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def guarded_rows(rows: Tensor, used: int) -> Tensor:
    """Return a copy of a table in which each row has a guard page after its first entries.

    The other entries exist in the shape alone: a read of any of them ends the process. So the
    result must not be copied, printed or compared as a whole.

    Args:
        rows: [rows, columns] int32 or int64, on a CPU or a CUDA device.
        used: Number of entries of each row that may be read. At least 1.

    Raises:
        OSError, OutsideSupport, RuntimeError: As in `guarded`.
    """
    size, (count, columns) = rows.element_size(), rows.shape
    if columns * size > PAGE:
        raise ValueError(f"columns = {columns}: expected at most {PAGE // size}")
    room = _step(rows.device)
    if rows.device.type == "cpu":
        memory = _bytes_before_guards(room, count, rows.device)
        table = memory.view(rows.dtype).as_strided(
            (count, columns), (2 * room // size, 1), room // size - used
        )
    else:
        mapped = _Mapped(room, count, rows.device)
        table = mapped.tensor(
            room - used * size, (count, columns), (2 * room, size), rows.dtype
        )
    table[:, :used].copy_(rows[:, :used])
    return table


def _step(device: torch.device) -> int:
    """Return the size of a page in bytes."""
    return PAGE if device.type == "cpu" else _Mapped.step(device)


def _bytes_before_guards(num_bytes: int, count: int, device: torch.device) -> Tensor:
    """Return [bytes] uint8: whole pages, with a guard after them.

    Args:
        num_bytes: Bytes between two guards. It is rounded up to whole pages.
        count: Number of guards. The bytes of the guards between are a part of the tensor; those
            of the last one are not.
        device: The device, a CPU or a CUDA device.
    """
    page = _step(device)
    room = math.ceil(num_bytes / page) * page
    if device.type == "cuda":
        return _Mapped(room, 1, device).tensor(0, (room,), (1,), torch.uint8)
    if not CAN_PROTECT:
        raise OutsideSupport("memory that ends at a guard page, on Windows")
    step = room + page
    memory = torch.frombuffer(mmap.mmap(-1, count * step), dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for index in range(count):
        address = ctypes.c_void_p(memory.data_ptr() + index * step + room)
        if protect(address, ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect did not protect a page")
    return memory[:room] if count == 1 else memory


class _Location(ctypes.Structure):
    """CUmemLocation: memory of a device."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of a device."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc: who may access memory, and how."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


ON_DEVICE, PINNED, READ_AND_WRITE = 1, 1, 3
"""Values of the driver's enumerations: location type, allocation type, access flags."""


class _Mapped:
    """Reserved addresses of a CUDA device, of which equal parts alternate: mapped, not mapped.

    Args:
        room: Bytes of a part, a multiple of the device's granularity.
        count: Number of parts that are mapped. Each is followed by one that is not.
        device: The CUDA device.

    Raises:
        RuntimeError: The driver reports an error.
    """

    def __init__(self, room: int, count: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # the driver needs the context of the device
        self.room, self.count = room, count
        self.start = ctypes.c_uint64()
        self.handles: list[ctypes.c_uint64] = []
        properties = _properties_of(device)
        access = _Access(properties.location, READ_AND_WRITE)
        size = ctypes.c_size_t(room)
        _call(
            "cuMemAddressReserve",
            ctypes.byref(self.start),
            ctypes.c_size_t(2 * room * count),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        for address in self._parts():
            handle = ctypes.c_uint64()
            _call(
                "cuMemCreate",
                ctypes.byref(handle),
                size,
                ctypes.byref(properties),
                ctypes.c_uint64(0),
            )
            self.handles.append(handle)
            _call(
                "cuMemMap",
                address,
                size,
                ctypes.c_size_t(0),
                handle,
                ctypes.c_uint64(0),
            )
            _call(
                "cuMemSetAccess",
                address,
                size,
                ctypes.byref(access),
                ctypes.c_size_t(1),
            )

    def _parts(self) -> Iterator[ctypes.c_uint64]:
        """Yield the address of each mapped part."""
        for index in range(self.count):
            yield ctypes.c_uint64(self.start.value + 2 * self.room * index)

    @staticmethod
    def step(device: torch.device) -> int:
        """Return the granularity of mapped memory in bytes."""
        found = ctypes.c_size_t()
        properties = ctypes.byref(_properties_of(device))
        _call("cuMemGetAllocationGranularity", ctypes.byref(found), properties, 0)
        return found.value

    def tensor(
        self,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a view of the memory, which keeps it mapped.

        Args:
            offset, strides: In bytes.
            shape: The shape.
            dtype: One of TYPES.
        """
        self.__cuda_array_interface__ = {
            "data": (self.start.value + offset, False),
            "shape": shape,
            "strides": strides,
            "typestr": TYPES[dtype],
            "version": 3,
        }
        return torch.as_tensor(self, device="cuda")

    def __del__(self) -> None:
        """Unmap the memory, once no kernel uses it. A lost context has no memory to unmap."""
        size = ctypes.c_size_t(self.room)
        with suppress(Exception):
            torch.cuda.synchronize()
            for address, handle in zip(self._parts(), self.handles, strict=False):
                _call("cuMemUnmap", address, size)
                _call("cuMemRelease", handle)
            whole = ctypes.c_size_t(2 * self.room * self.count)
            _call("cuMemAddressFree", self.start, whole)


def _properties_of(device: torch.device) -> _Properties:
    """Return the properties of memory that is allocated on a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _Properties(PINNED, 0, _Location(ON_DEVICE, index))


@cache
def _driver() -> Any:
    """Return the library of the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver.

    Raises:
        RuntimeError: It returns an error.
    """
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(
            f"{name} of the CUDA driver returned error {code}; expected 0"
        )
