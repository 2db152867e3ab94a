"""Operators of the Gluon interpreter's values: arithmetic and comparisons, as C has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .values import (
    TORCH_DTYPES,
    InterpreterError,
    Pointer,
    Value,
    lift,
    of_tensor,
    promote,
    wrap,
)


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
            f"an overflow of {dtype}: {values.min()}, {values.max()}", "overflow"
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


def _both_ways(
    name: str, apply: Callable[..., Value], operation: Callable[[Any, Any], Any]
) -> None:
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
