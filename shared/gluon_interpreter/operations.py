"""Operations of Gluon on values, and on global memory, as plain functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .arithmetic import combine
from .machine import current_role
from .values import (
    TORCH_DTYPES,
    InterpreterError,
    Pointer,
    Value,
    is_integer,
    lift,
    of_tensor,
    promote,
)

# creation


def arange(start: Any, end: Any, layout: Any = None) -> Value:
    """Return the integers from start to end."""
    size = int(end) - int(start)
    assert size & (size - 1) == 0, (
        f"gl.arange of {size} numbers: expected a power of two"
    )
    return Value(torch.arange(int(start), int(end), dtype=torch.int32), gl.int32)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    """Return a tile of one number."""
    number = lift(value, dtype).to(dtype).tensor
    sizes = [int(size) for size in shape]
    if any(size & (size - 1) for size in sizes):
        raise InterpreterError(f"a tile of {sizes}: expected powers of two")
    return Value(number.expand(sizes).clone(), dtype)


def full_like(value: Value, number: Any) -> Value:
    """Return a tile of one number, with the shape and dtype of another one."""
    return full(value.shape, number, value.dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Value:
    """Return a tile of zeros."""
    return full(shape, 0, dtype)


# memory


def load(
    pointer: Pointer,
    mask: Any = None,
    other: Any = None,
    cache_modifier: str = "",
    eviction_policy: str = "",
) -> Value:
    """Return the elements at addresses; where the mask is off `other`, or any number."""
    current_role().pause()
    memory = pointer.memory
    if isinstance(pointer.data, int) and (mask is None or not lift(mask).shape):
        if mask is not None and not bool(lift(mask)):
            return lift(0 if other is None else other, memory.dtype).to(memory.dtype)
        offset = torch.tensor([pointer.data])
        memory.check(offset, torch.ones(1, dtype=torch.bool), "a load")
        current_role().machine.memory.note_load(memory.flat, offset)
        return of_tensor(memory.flat[pointer.data].clone())
    offset = torch.as_tensor(pointer.data)
    is_on = torch.tensor(True) if mask is None else lift(mask).tensor
    offset, is_on = torch.broadcast_tensors(offset, is_on)
    memory.check(offset, is_on, "a load")
    current_role().machine.memory.note_load(memory.flat, offset[is_on])
    numbers = torch.full(offset.shape, 0, dtype=memory.flat.dtype)
    if other is None:
        # undefined on a GPU
        numbers.view(torch.uint8).fill_(0x7F)
    else:
        numbers = lift(other, memory.dtype).to(memory.dtype).tensor.expand(offset.shape)
        numbers = numbers.clone()
    numbers[is_on] = memory.flat[offset[is_on]]
    return Value(numbers, memory.dtype)


def store(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    """Store elements to addresses where the mask is on."""
    current_role().pause()
    memory = pointer.memory
    value = lift(value, memory.dtype).to(memory.dtype).tensor
    is_on = torch.tensor(True) if mask is None else lift(mask).tensor
    offset = torch.as_tensor(pointer.data)
    offset, value, is_on = torch.broadcast_tensors(offset, value, is_on)
    memory.check(offset, is_on, "a store")
    used = offset[is_on].flatten()
    current_role().machine.memory.note_store(memory.flat, used)
    current_role().has_stored |= len(used) > 0
    if len(used) > len(used.unique()) and not is_integer(memory.dtype):
        raise InterpreterError("a store of two numbers to one element", "race")
    memory.flat[used] = value[is_on].flatten()


def atomic_add(
    pointer: Pointer, value: Value, mask: Any = None, sem: str = "", scope: str = ""
) -> Value:
    """Add to elements one after another, and return what they were.

    One thread adds to a counter. What the role's other warps have stored is released with it only
    after a barrier.
    """
    role = current_role()
    role.pause()
    if role.has_stored and role.num_warps > 1 and sem != "relaxed":
        raise InterpreterError(
            "a role of several warps adds to a counter after stores: expected a barrier between",
            "race",
        )
    memory = pointer.memory
    is_on = torch.tensor(True) if mask is None else lift(mask).tensor
    offset, numbers, is_on = torch.broadcast_tensors(
        torch.as_tensor(pointer.data), lift(value).tensor, is_on
    )
    memory.check(offset, is_on, "an atomic addition")
    before = torch.zeros(offset.shape, dtype=memory.flat.dtype)
    for place in is_on.nonzero().tolist():
        place = tuple(place)
        address = memory.flat.data_ptr() + int(offset[place]) * memory.flat.itemsize
        current_role().machine.memory.add_to_counter(address, sem, scope)
        before[place] = memory.flat[offset[place]]
        memory.flat[offset[place]] += numbers[place]
    return of_tensor(before)


# shapes


def expand_dims(value: Value, axis: int) -> Value:
    """Return a value with one more dimension."""
    if isinstance(value, Pointer):
        return Pointer(value.memory, value.data.unsqueeze(axis))
    return Value(value.tensor.unsqueeze(axis), value.dtype)


def broadcast(left: Value, right: Value) -> tuple[Value, Value]:
    """Return two values in their common shape."""
    pair = torch.broadcast_tensors(left.tensor, right.tensor)
    return Value(pair[0], left.dtype), Value(pair[1], right.dtype)


def reshape(value: Value, shape: Any) -> Value:
    """Return the numbers in another shape, in the same order."""
    return value.reshape(shape)


def join(left: Value, right: Value) -> Value:
    """Return two tiles as one with a last dimension of 2."""
    return Value(torch.stack((left.tensor, right.tensor), -1), left.dtype)


def split(value: Value) -> tuple[Value, Value]:
    """Return the two tiles that `join` has joined."""
    left, right = value.tensor.unbind(-1)
    return Value(left, value.dtype), Value(right, value.dtype)


def gather(source: Value, index: Value, axis: int) -> Value:
    """Return the elements of each index along an axis."""
    places = index.tensor.long()
    size = source.tensor.shape[axis]
    if not bool(((places >= 0) & (places < size)).all()):
        raise InterpreterError(f"gl.gather of {size} elements: an index is past them")
    return Value(source.tensor.gather(axis, places), source.dtype)


def convert_layout(value: Value, layout: Any, assert_trivial: bool = False) -> Value:
    """Return the value: layouts of registers have no meaning here."""
    return value


def multiple_of(value: Value, numbers: Any) -> Value:
    """Return the value, after a check of what the kernel promises about it.

    Args:
        numbers: per dimension. Of addresses one, and the first of each row, are checked; of
            integers all.
    """
    if isinstance(value, Pointer) and isinstance(value.data, int):
        place = value.memory.flat.data_ptr() + value.data * value.memory.flat.itemsize
        if place % _largest(numbers):
            raise InterpreterError("an address is not the multiple that was promised")
        return value
    if isinstance(value, Pointer) and isinstance(numbers, list):
        flat = value.memory.flat
        first = value.data[..., 0] * flat.itemsize + flat.data_ptr()
        if bool((first % numbers[-1]).any()):
            raise InterpreterError("addresses are not the multiples that were promised")
    elif is_integer(value.dtype) and bool((value.tensor % _largest(numbers)).any()):
        raise InterpreterError("numbers are not the multiples that were promised")
    return value


def _largest(numbers: Any) -> int:
    return max(numbers) if isinstance(numbers, list) else int(numbers)


# arithmetic


def where(condition: Any, left: Any, right: Any) -> Value:
    """Return `left` where the condition holds, else `right`."""
    condition = lift(condition)
    left = lift(left, right.dtype if isinstance(right, Value) else None)
    right = lift(right, left.dtype)
    dtype = promote(left.dtype, right.dtype)
    if not condition.shape and not left.shape and not right.shape:
        number: Value = left if bool(condition) else right
        return number.to(dtype)
    kind = TORCH_DTYPES[dtype]
    chosen = torch.where(
        condition.tensor.bool(), left.tensor.to(kind), right.tensor.to(kind)
    )
    return Value(chosen, dtype)


def maximum(left: Any, right: Any) -> Value:
    """Return the larger numbers; of NaN and a number the number, as a GPU does."""
    return _extreme(left, right, max, torch.fmax, torch.maximum)


def minimum(left: Any, right: Any) -> Value:
    """Return the smaller numbers; of NaN and a number the number, as a GPU does."""
    return _extreme(left, right, min, torch.fmin, torch.minimum)


def _extreme(
    left: Any, right: Any, of_ints: Any, of_floats: Any, of_tiles: Any
) -> Value:
    def choose(left: Any, right: Any) -> Any:
        if isinstance(left, int):
            return of_ints(left, right)
        return (of_floats if left.is_floating_point() else of_tiles)(left, right)

    return combine(left, right, choose)


def unary(operation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Value]:
    return lambda value: of_tensor(operation(lift(value, gl.float32).tensor))


def fma(left: Any, right: Any, addend: Any) -> Value:
    """Return left * right + addend, rounded once."""
    wide = (lift(term, gl.float32).tensor.double() for term in (left, right, addend))
    left, right, addend = wide
    return of_tensor((left * right + addend).float())


def dot(left: Value, right: Value, acc: Value | None = None) -> Value:
    """Return the product of two tiles, added to an accumulator if one is given."""
    if acc is None:
        acc = zeros([*left.shape[:-1], right.shape[-1]], gl.float32)
    return mma_v2(left, right, acc)


def mma_v2(left: Value, right: Value, acc: Value) -> Value:
    """Return the sum of an accumulator and of products of tiles, one product per first index."""
    if left.dtype != right.dtype or acc.dtype != gl.float32:
        raise InterpreterError(
            f"a product of {left.dtype} and {right.dtype} into {acc.dtype}"
        )
    product = left.tensor.float() @ right.tensor.float()
    if list(product.shape) != acc.shape:
        raise InterpreterError(
            f"a product of {left.shape} and {right.shape} into {acc.shape}"
        )
    return Value(acc.tensor + product, gl.float32)


# reductions


def gl_sum(value: Value, axis: int) -> Value:
    """Return sums along a dimension."""
    return _reduce(value, axis, lambda tensor: tensor.sum(axis, dtype=tensor.dtype))


def gl_max(value: Value, axis: int) -> Value:
    """Return largest numbers along a dimension; NaN is left out, as on a GPU."""
    return _reduce(
        value, axis, lambda tensor: _ignore_nan(tensor, -math.inf).amax(axis)
    )


def gl_min(value: Value, axis: int) -> Value:
    """Return smallest numbers along a dimension; NaN is left out, as on a GPU."""
    return _reduce(value, axis, lambda tensor: _ignore_nan(tensor, math.inf).amin(axis))


def _ignore_nan(tensor: torch.Tensor, neutral: float) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    is_nan = tensor.isnan()
    return torch.where(is_nan, neutral, tensor)


def _reduce(value: Value, axis: int, operation: Any) -> Value:
    tensor = value.tensor
    if value.dtype == gl.int1:
        tensor = tensor.to(torch.int32)
    return of_tensor(operation(tensor))


def cumsum(value: Value, axis: int) -> Value:
    """Return sums of all numbers up to each one along a dimension."""
    return of_tensor(value.tensor.cumsum(axis).to(value.tensor.dtype))


def associative_scan(value: Value, axis: int, function: Any) -> Value:
    """Return the combination of all numbers up to each one along a dimension."""
    parts = [Value(element, value.dtype) for element in value.tensor.unbind(axis)]
    parts = [of_tensor(part.tensor) for part in parts]
    for i in range(1, len(parts)):
        parts[i] = function(parts[i - 1], parts[i])
    return Value(torch.stack([part.tensor for part in parts], axis), parts[0].dtype)
