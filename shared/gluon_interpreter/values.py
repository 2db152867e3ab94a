"""Values of the Gluon interpreter: numbers, tiles of numbers and pointers to checked memory.

A value has a Triton dtype. Its numbers are a torch tensor, or a Python integer if it is an integer
or a truth value without dimensions, because a kernel computes thousands of those. Layouts of
registers have no meaning here: a tile is computed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .places import Place

TORCH_DTYPES = {
    gl.int1: torch.bool,
    gl.int8: torch.int8,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.uint8: torch.uint8,
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float32: torch.float32,
    gl.float64: torch.float64,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.float8e5: torch.float8_e5m2,
}
GLUON_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
INTEGERS = frozenset((gl.int1, gl.int8, gl.uint8, gl.int16, gl.int32, gl.int64))


LIMITS = {dtype: 2 ** (dtype.primitive_bitwidth - 1) for dtype in INTEGERS}
"""Integers of a dtype are at least minus this and below it."""


class InterpreterError(AssertionError):
    """The kernel did what a GPU does not define, or what its partner does not expect.

    Args:
        message: what was expected.
        kind: of the fault: "race", "deadlock", "missing fence", "missing wait", "uninitialized
            read", "out of bounds", "overflow" or "wrong use".
        place: Optional. The line of the kernel. If None, it is the one that raises the error.
        role: Optional. Number of the role. If None, it is the one that raises the error.
        others: further lines of the kernel, and what is at each.
    """

    def __init__(
        self,
        message: str,
        kind: str = "wrong use",
        place: Place | None = None,
        role: int | None = None,
        others: Sequence[tuple[str, Place]] = (),
    ) -> None:
        super().__init__(message)
        self.kind, self.place, self.role, self.others = kind, place, role, others


def is_integer(dtype: Any) -> bool:
    """Return whether a Triton dtype is an integer or a truth value."""
    return dtype in INTEGERS


def promote(left: Any, right: Any) -> Any:
    """Return the dtype of an operation on two values, scalars included."""
    if left is right or left == right:
        return left
    promoted = torch.promote_types(TORCH_DTYPES[left], TORCH_DTYPES[right])
    return GLUON_DTYPES[promoted]


def wrap(number: int, dtype: Any) -> int:
    """Return an integer as so many bits hold it.

    Raises:
        InterpreterError: 32 bits do not hold it. A kernel that means to wrap does not add signed
            numbers.
    """
    if dtype is gl.int1:
        return int(bool(number))
    limit = LIMITS[dtype]
    if not -limit <= number < limit:
        raise InterpreterError(
            f"{number} does not fit {dtype}: expected no overflow", "overflow"
        )
    return number


class TypeOf:
    """What a kernel asks about the type of a value."""

    layout = None

    def __init__(self, dtype: Any) -> None:
        self.element_ty = self.scalar = dtype


class Value:
    """A number, or a tile of numbers, in the registers of one role.

    Args:
        data: the numbers; a Python integer for an integer without dimensions.
        dtype: the Triton dtype.
    """

    def __init__(self, data: Any, dtype: Any) -> None:
        self._data = data
        self.dtype = dtype

    @property
    def data(self) -> Any:
        """The numbers."""
        return self._data

    @property
    def shape(self) -> list[int]:
        """The sizes; empty for a number."""
        return [] if isinstance(self.data, int) else list(self.data.shape)

    @property
    def type(self) -> TypeOf:
        """The type of its elements. Its layout is None."""
        return TypeOf(self.dtype)

    @property
    def tensor(self) -> torch.Tensor:
        """The numbers as a torch tensor."""
        if isinstance(self.data, int):
            return torch.tensor(self.data, dtype=TORCH_DTYPES[self.dtype])
        numbers: torch.Tensor = self.data
        return numbers

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        """Return the value in another dtype; with `bitcast` the same bits."""
        kind = TORCH_DTYPES[dtype]
        if bitcast:
            return Value(self.tensor.view(kind), dtype)
        if isinstance(self.data, int) and is_integer(dtype):
            return Value(wrap(self.data, dtype), dtype)
        if self.tensor.is_floating_point() and is_integer(dtype):
            return of_tensor(self.tensor.trunc().to(kind))
        return of_tensor(self.tensor.to(kind))

    def __bool__(self) -> bool:
        if self.shape:
            raise InterpreterError("a branch on a tile: expected one number")
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.data)

    __index__ = __int__

    def __getitem__(self, index: Any) -> Value:
        """Return the value with more dimensions: indices are `:` and None."""
        return Value(self.tensor[index], self.dtype)

    def reshape(self, shape: Any) -> Value:
        """Return the numbers in another shape, in the same order."""
        return Value(self.tensor.reshape([int(size) for size in shape]), self.dtype)

    def permute(self, dims: Any) -> Value:
        """Return the value with its dimensions in another order."""
        return Value(self.tensor.permute([int(dim) for dim in dims]), self.dtype)

    def __neg__(self) -> Value:
        if isinstance(self.data, int):
            return Value(wrap(-self.data, self.dtype), self.dtype)
        return Value(-self.data, self.dtype)


class Pointer(Value):
    """Addresses of elements of one tensor, which are checked when they are used.

    Args:
        memory: the tensor that they belong to.
        offset: elements after its first; a number, or an int64 tensor.
    """

    def __init__(self, memory: Memory, offset: Any) -> None:
        super().__init__(offset, gl.pointer_type(memory.dtype))
        self.memory = memory

    def __getitem__(self, index: Any) -> Pointer:
        """Return the addresses with more dimensions: indices are `:` and None."""
        return Pointer(self.memory, torch.as_tensor(self.data)[index])

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        """Return the same addresses as those of elements of another dtype.

        Raises:
            InterpreterError: an address is not a multiple of an element's size.
        """
        assert bitcast, dtype
        old, new = self.memory.flat, TORCH_DTYPES[dtype.element_ty]
        size, codes = new.itemsize, old.view(torch.uint8)
        # whole elements begin at the first multiple of their size
        codes = codes[-old.data_ptr() % size :]
        codes = codes[: len(codes) // size * size]
        address = torch.as_tensor(self.data) * old.itemsize + old.data_ptr()
        if bool((address % size).any()):
            raise InterpreterError(
                f"a pointer to {dtype.element_ty}: expected a multiple of {size} bytes"
            )
        offset = (address - codes.data_ptr()) // size
        return Pointer(Memory(codes.view(new)), offset if offset.dim() else int(offset))


class Memory:
    """The elements of a tensor in global memory.

    Args:
        tensor: any strides. Elements between its own, of a tensor that it is a view of, count as
            its own.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = GLUON_DTYPES[tensor.dtype]
        span = 0
        if tensor.numel():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            span = 1 + sum((size - 1) * stride for size, stride in pairs)
        self.flat = tensor.as_strided((span,), (1,))

    def check(self, offset: torch.Tensor, mask: torch.Tensor, what: str) -> None:
        """Raise `InterpreterError` if an element that the mask selects is not of the tensor."""
        used = offset[mask]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < len(
            self.flat
        ):
            raise InterpreterError(
                f"{what} of the elements {int(used.min())} to {int(used.max())} of a tensor that"
                f" spans {len(self.flat)}",
                "out of bounds",
            )


def of_tensor(tensor: torch.Tensor) -> Value:
    """Return torch numbers as a value."""
    dtype = GLUON_DTYPES[tensor.dtype]
    if tensor.dim() == 0 and is_integer(dtype):
        return Value(int(tensor), dtype)
    return Value(tensor, dtype)


def lift(value: Any, like: Any = None) -> Value:
    """Return a Python number as a value, which takes the dtype of the value it meets.

    Args:
        value: a value, or a number.
        like: Optional. The dtype that it meets. If None, numbers are int32 and float32.
    """
    if isinstance(value, Value):
        return value
    if isinstance(value, bool):
        return Value(int(value), gl.int1)
    if isinstance(value, int):
        fits = like is not None and like is not gl.int1
        if fits and not is_integer(like):
            return Value(torch.tensor(value, dtype=TORCH_DTYPES[like]), like)
        dtype = gl.int32 if -(2**31) <= value < 2**31 else gl.int64
        return Value(value, like if fits else dtype)
    dtype = like if like is not None and not is_integer(like) else gl.float32
    return Value(torch.tensor(value, dtype=TORCH_DTYPES[dtype]), dtype)
