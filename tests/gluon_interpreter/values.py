"""Values of the Gluon interpreter: numbers, tiles of numbers and pointers to checked memory.

A value has a Triton dtype. Its numbers are a torch tensor, or a Python integer if it is an integer
or a truth value without dimensions, because a kernel computes thousands of those. Layouts of
registers have no meaning here: a tile is computed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl

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
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.float8e5: torch.float8_e5m2,
}
GLUON_DTYPES = {each: dtype for dtype, each in TORCH_DTYPES.items()}
INTEGERS = frozenset((gl.int1, gl.int8, gl.uint8, gl.int16, gl.int32, gl.int64))


LIMITS = {each: 2 ** (each.primitive_bitwidth - 1) for each in INTEGERS}
"""Integers of a dtype are at least minus this and below it."""


class InterpreterError(AssertionError):
    """The kernel did what a GPU does not define, or what its partner does not expect."""


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
        raise InterpreterError(f"{number} does not fit {dtype}: expected no overflow")
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
        return self.data

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
                f" spans {len(self.flat)}"
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


def _divide(left: Any, right: Any) -> Any:
    """Return quotients rounded towards zero, as C does."""
    if isinstance(left, int) and isinstance(right, int):
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    return torch.div(left, right, rounding_mode="trunc")


def _remainder(left: Any, right: Any) -> Any:
    """Return remainders that have the sign of the dividend, as C does."""
    if isinstance(left, int) and isinstance(right, int):
        return left - _divide(left, right) * right
    return torch.fmod(left, right)


def _to_int32(values: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Return int64 numbers as int32; raise `InterpreterError` if one does not fit."""
    limit = 2**31
    if values.numel() and not -limit <= int(values.min()) <= int(values.max()) < limit:
        raise InterpreterError(
            f"an overflow of {dtype}: {values.min()}, {values.max()}"
        )
    return values.to(torch.int32)


def combine(left: Any, right: Any, operation: Callable[[Any, Any], Any]) -> Value:
    """Return an arithmetic operation on two values in their common dtype."""
    if isinstance(right, Pointer):
        left, right = right, left
    if isinstance(left, Pointer):
        moved = operation(left.data, _as_offset(right))
        return Pointer(left.memory, moved)
    left = lift(left, right.dtype if isinstance(right, Value) else None)
    right = lift(right, left.dtype)
    dtype = promote(left.dtype, right.dtype)
    if isinstance(left.data, int) and isinstance(right.data, int):
        if dtype is gl.int1:
            dtype = gl.int32
        return Value(wrap(operation(left.data, right.data), dtype), dtype)
    kind = TORCH_DTYPES[dtype]
    if dtype is gl.int32:
        wide = operation(left.tensor.to(torch.int64), right.tensor.to(torch.int64))
        return Value(_to_int32(wide, dtype), dtype)
    return of_tensor(operation(left.tensor.to(kind), right.tensor.to(kind)))


def _as_offset(value: Any) -> Any:
    value = lift(value)
    return value.data if isinstance(value.data, int) else value.data.to(torch.int64)


def compare(left: Any, right: Any, operation: Callable[[Any, Any], Any]) -> Value:
    """Return the truth value of a comparison of two values."""
    left = lift(left, right.dtype if isinstance(right, Value) else None)
    right = lift(right, left.dtype)
    if isinstance(left.data, int) and isinstance(right.data, int):
        return Value(int(operation(left.data, right.data)), gl.int1)
    kind = TORCH_DTYPES[promote(left.dtype, right.dtype)]
    return of_tensor(operation(left.tensor.to(kind), right.tensor.to(kind)))


def _both_ways(name: str, apply: Any, operation: Callable[[Any, Any], Any]) -> None:
    def forward(self: Value, other: Any) -> Value:
        return apply(self, other, operation)

    def reflected(self: Value, other: Any) -> Value:
        return apply(other, self, operation)

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", reflected)


for _name, _operation in {
    "add": lambda left, right: left + right,
    "sub": lambda left, right: left - right,
    "mul": lambda left, right: left * right,
    "floordiv": _divide,
    "mod": _remainder,
    "and": lambda left, right: left & right,
    "or": lambda left, right: left | right,
    "xor": lambda left, right: left ^ right,
    "lshift": lambda left, right: left << right,
    "rshift": lambda left, right: left >> right,
}.items():
    _both_ways(_name, combine, _operation)
_both_ways(
    "truediv",
    lambda left, right, operation: combine(
        lift(left, gl.float32), lift(right, gl.float32), operation
    ),
    lambda left, right: left / right,
)
for _name, _operation in {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "lt": lambda left, right: left < right,
    "le": lambda left, right: left <= right,
    "gt": lambda left, right: left > right,
    "ge": lambda left, right: left >= right,
}.items():
    _both_ways(_name, compare, _operation)
