"""The operations of Gluon that the kernels for Hopper use, as plain functions on values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .accesses import Clock
from .machine import (
    MAX_ROLES,
    Barrier,
    Copy,
    NamedBarrier,
    Product,
    ProductValue,
    current_role,
    same_bits,
)
from .shared_memory import Buffer, SharedView
from .values import (
    TORCH_DTYPES,
    InterpreterError,
    Memory,
    Pointer,
    Value,
    combine,
    compare,
    is_integer,
    lift,
    of_tensor,
    promote,
)

LAYOUT = None
"""Any layout of registers."""


def _layout(*args: Any, **kwargs: Any) -> None:
    return LAYOUT


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
    sizes = [int(each) for each in shape]
    if any(each & (each - 1) for each in sizes):
        raise InterpreterError(f"a tile of {sizes}: expected powers of two")
    return Value(number.expand(sizes).clone(), dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Value:
    """Return a tile of zeros."""
    return full(shape, 0, dtype)


def full_like(value: Value, number: Any) -> Value:
    """Return a tile of one number in the shape and dtype of another."""
    return full(value.shape, number, value.dtype)


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
        return of_tensor(memory.flat[pointer.data].clone())
    offset = torch.as_tensor(pointer.data)
    is_on = torch.tensor(True) if mask is None else lift(mask).tensor
    offset, is_on = torch.broadcast_tensors(offset, is_on)
    memory.check(offset, is_on, "a load")
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
    current_role().machine.note_store(memory.flat, used)
    if len(used) > len(used.unique()) and not is_integer(memory.dtype):
        raise InterpreterError("a store of two numbers to one element")
    memory.flat[used] = value[is_on].flatten()


def atomic_add(
    pointer: Pointer, value: Value, mask: Any = None, sem: str = "", scope: str = ""
) -> Value:
    """Add to elements one after another, and return what they were."""
    current_role().pause()
    memory = pointer.memory
    is_on = torch.tensor(True) if mask is None else lift(mask).tensor
    offset, numbers, is_on = torch.broadcast_tensors(
        torch.as_tensor(pointer.data), lift(value).tensor, is_on
    )
    memory.check(offset, is_on, "an atomic addition")
    before = torch.zeros(offset.shape, dtype=memory.flat.dtype)
    for place in is_on.nonzero().tolist():
        place = tuple(place)
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
    return Value(value.tensor.reshape([int(each) for each in shape]), value.dtype)


def join(left: Value, right: Value) -> Value:
    """Return two tiles as one with a last dimension of 2."""
    return Value(torch.stack((left.tensor, right.tensor), -1), left.dtype)


def split(value: Value) -> tuple[Value, Value]:
    """Return the two tiles that `join` has joined."""
    left, right = value.tensor.unbind(-1)
    return Value(left, value.dtype), Value(right, value.dtype)


def convert_layout(value: Value, layout: Any, assert_trivial: bool = False) -> Value:
    """Return the value: layouts of registers have no meaning here."""
    return value


def multiple_of(value: Value, numbers: Any) -> Value:
    """Return the value, after a check of what the kernel promises about its addresses."""
    if isinstance(value, Pointer) and numbers == [1, 16]:
        address = value.memory.flat.data_ptr() // value.memory.flat.element_size()
        first = value.data[:, 0] + address
        if bool((first * value.memory.flat.element_size() % 16).any()):
            raise InterpreterError("addresses are not the multiples that were promised")
    return value


# arithmetic


def where(condition: Any, left: Any, right: Any) -> Value:
    """Return `left` where the condition holds, else `right`."""
    condition = lift(condition)
    left = lift(left, right.dtype if isinstance(right, Value) else None)
    right = lift(right, left.dtype)
    dtype = promote(left.dtype, right.dtype)
    if not condition.shape and not left.shape and not right.shape:
        return (left if bool(condition) else right).to(dtype)
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


def _unary(operation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Value]:
    return lambda value: of_tensor(operation(lift(value, gl.float32).tensor))


def fma(left: Any, right: Any, addend: Any) -> Value:
    """Return left * right + addend, rounded once."""
    wide = (lift(each, gl.float32).tensor.double() for each in (left, right, addend))
    left, right, addend = wide
    return of_tensor((left * right + addend).float())


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


def associative_scan(value: Value, axis: int, function: Any) -> Value:
    """Return the combination of all numbers up to each one along a dimension."""
    parts = [Value(each, value.dtype) for each in value.tensor.unbind(axis)]
    parts = [of_tensor(each.tensor) for each in parts]
    for i in range(1, len(parts)):
        parts[i] = function(parts[i - 1], parts[i])
    return Value(torch.stack([each.tensor for each in parts], axis), parts[0].dtype)


# the program


def program_id(axis: int) -> Value:
    """Return the index of the program along an axis of the grid."""
    return Value(current_role().machine.program[axis], gl.int32)


def num_programs(axis: int) -> Value:
    """Return the programs along an axis of the grid."""
    return Value(current_role().machine.grid[axis], gl.int32)


def num_warps() -> int:
    """Return the warps of the role."""
    return current_role().num_warps


def static_assert(condition: Any, message: str = "") -> None:
    """Check a constant condition."""
    assert condition, message


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> SharedView:
    """Return a new buffer of shared memory."""
    sizes = [int(each) for each in shape]
    buffer = Buffer(math.prod(sizes) * TORCH_DTYPES[dtype].itemsize)
    current_role().machine.buffers.append(buffer)
    return SharedView(buffer, dtype, sizes, layout)


def reinterpret(buffer: SharedView, dtype: Any, shape: Any, layout: Any) -> SharedView:
    """Return a view of the same bytes."""
    return buffer.reinterpret(dtype, shape, layout)


def warp_specialize(
    functions: list[tuple[Any, Any]], worker_warps: list[int], registers: list[int]
) -> None:
    """Run the roles of a program."""
    role = current_role()
    assert len(functions) == len(worker_warps) + 1 == len(registers) + 1
    role.machine.run_roles(functions, [role.num_warps, *worker_warps])


def barrier() -> None:
    """Let others run: the threads of a role act as one here."""
    current_role().pause()


MAX_ITERATIONS = 10_000
"""Iterations of a loop, at most. Those of the tests have a few tens."""


class Range:
    """The loop counter of a kernel: an int32 value that divides as C does."""

    def __init__(self, *bounds: Any) -> None:
        self._numbers = range(*(int(each) for each in bounds))
        if len(self._numbers) > MAX_ITERATIONS:
            raise InterpreterError(f"a loop of {len(self._numbers)} iterations")

    def __iter__(self) -> Iterator[Value]:
        return (Value(each, gl.int32) for each in self._numbers)


# barriers, copies and products


def barrier_init(view: SharedView, count: int) -> None:
    """Initialize an mbarrier."""
    machine = current_role().machine
    machine.barriers[id(view.buffer), view.first] = Barrier(
        int(count), int(count), Clock(MAX_ROLES), Clock(MAX_ROLES)
    )


def barrier_expect(view: SharedView, num_bytes: Any, pred: Any = True) -> None:
    """Arrive at an mbarrier, whose phase then also waits for so many bytes."""
    role = current_role()
    role.pause()
    if bool(lift(pred)):
        state = role.machine.barrier(view)
        state.expected += int(num_bytes)
        state.pending -= 1
        role.clock.release(state.arriving)
        state.advance()


def barrier_arrive(view: SharedView, count: int = 1, pred: Any = True) -> None:
    """Arrive at an mbarrier."""
    role = current_role()
    role.pause()
    if bool(lift(pred)):
        state = role.machine.barrier(view)
        state.pending -= int(count)
        role.clock.release(state.arriving)
        state.advance()


def barrier_wait(
    view: SharedView, phase: Any, pred: Any = True, deps: Any = ()
) -> None:
    """Wait until the phase of a parity has completed."""
    role = current_role()
    if not bool(lift(pred)):
        return
    state, parity = role.machine.barrier(view), int(phase)
    assert parity in (0, 1), parity
    role.wait_until(
        lambda: state.completed % 2 != parity,
        f"phase {parity} of an mbarrier with {state.pending} of {state.count} arrivals and"
        f" {state.expected} bytes missing after {state.completed} phases",
    )
    role.clock.join(state.released)


def fence_async_shared(cluster: bool = False) -> None:
    """Make the role's stores to shared memory visible to copies and products."""
    role = current_role()
    for buffer in role.machine.buffers:
        buffer.unfenced[buffer.unfenced == role.number + 1] = 0


class TensorMap:
    """A tensor map in a kernel.

    Args:
        memory: the bytes at its address.
        shape, strides: sizes and steps in elements.
        box: sizes of a box.
        layout: shared-memory layout of a box.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        dtype: Any,
        shape: Any,
        strides: Any,
        box: Any,
        layout: Any,
    ) -> None:
        self.plane = memory.as_strided(tuple(shape), tuple(strides))
        self.dtype, self.layout = dtype, layout
        self.block_type = SimpleNamespace(shape=list(box))

    def box(self, start: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the indices of the elements of a box, and which of them exist."""
        sizes = self.block_type.shape
        grid = torch.meshgrid(
            *(
                torch.arange(size) + int(first)
                for size, first in zip(sizes, start, strict=True)
            ),
            indexing="ij",
        )
        exists = torch.ones(sizes, dtype=torch.bool)
        for index, size in zip(grid, self.plane.shape, strict=True):
            exists &= (index >= 0) & (index < size)
        return tuple(index[exists] for index in grid), exists


def async_load(
    desc: TensorMap, start: Any, full: SharedView, result: SharedView, pred: Any = True
) -> None:
    """Issue the copy of a box to shared memory, which signals an mbarrier."""
    role = current_role()
    if not bool(lift(pred)):
        return
    if result.shape != desc.block_type.shape:
        raise InterpreterError(
            f"a box of {desc.block_type.shape} is loaded to shared memory of {result.shape}"
        )
    state = role.machine.barrier(full)
    index, exists = desc.box(start)
    if bool(result.buffer.unfenced.any()):
        result.check_fenced("an asynchronous load overwrites what")
    role.note(result, is_store=True, is_async=True)
    result.poison()

    def run() -> None:
        numbers = torch.zeros(exists.shape, dtype=desc.plane.dtype)
        numbers[exists] = desc.plane[index]
        result.write(numbers, None)
        state.expected -= exists.numel() * desc.plane.element_size()
        state.advance()

    role.machine.copies.append(Copy(run, False, role))
    role.pause()


def async_store(desc: TensorMap, start: Any, source: SharedView) -> None:
    """Issue the copy of a box from shared memory."""
    role = current_role()
    source.check_fenced("an asynchronous store")
    if source.shape != desc.block_type.shape:
        raise InterpreterError(
            f"a box of {desc.block_type.shape} is stored from shared memory of {source.shape}"
        )
    index, exists = desc.box(start)
    seen = source.read()

    def run() -> None:
        role.note(source, is_store=False)
        if not same_bits(source.read(), seen):
            raise InterpreterError(
                "shared memory was overwritten before it was stored asynchronously"
            )
        desc.plane[index] = seen[exists]

    steps = zip(index, desc.plane.stride(), strict=True)
    places = sum(
        (each * step for each, step in steps), torch.zeros((), dtype=torch.int64)
    )
    role.machine.note_store(desc.plane, places)
    role.machine.copies.append(Copy(run, True, role))
    role.pause()


def store_wait(pendings: int) -> None:
    """Wait until at most so many stores of the role are in flight."""
    role = current_role()
    role.machine.finish_stores(role, int(pendings))


def warpgroup_mma(
    left: SharedView | Value,
    right: SharedView,
    acc: Value,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: bool = False,
) -> Value:
    """Issue a product of tiles."""
    role = current_role()
    for operand in (left, right):
        if isinstance(operand, SharedView):
            operand.check_fenced("warpgroup_mma")
    seen = (
        left.read() if isinstance(left, SharedView) else left.tensor.clone(),
        right.read(),
    )
    if seen[0].dtype != seen[1].dtype:
        raise InterpreterError(f"a product of {seen[0].dtype} and {seen[1].dtype}")
    rows, columns = seen[0].shape[0], seen[1].shape[1]
    if acc.shape != [rows, columns] or seen[0].shape[1] != seen[1].shape[0]:
        raise InterpreterError(
            f"a product of {list(seen[0].shape)} and {list(seen[1].shape)} into {acc.shape}"
        )
    result = ProductValue(acc.shape)
    added = acc if bool(lift(use_acc)) else None
    role.products.append(Product(left, right, added, seen, result))
    role.pause()
    return result if is_async else warpgroup_mma_wait(0, deps=[result])


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Wait until at most so many products of the role are in flight."""
    role = current_role()
    role.pause()
    while len(role.products) > int(num_outstanding):
        role.products.pop(0).finish()
    return deps[0] if len(deps) == 1 else tuple(deps)


def named_barrier(number: int, is_waiting: bool, num_threads: int = 256) -> None:
    """Arrive at a named barrier with all threads of the role; perhaps wait for the others."""
    role = current_role()
    state = role.machine.named.setdefault(
        number, NamedBarrier(Clock(MAX_ROLES), Clock(MAX_ROLES))
    )
    state.arrived += 32 * role.num_warps
    if state.arrived > num_threads:
        raise InterpreterError(
            f"more than {num_threads} threads at named barrier {number}"
        )
    before = state.completed
    role.clock.release(state.arriving)
    if state.arrived == num_threads:
        state.arrived = 0
        state.completed += 1
        state.released.join(state.arriving)
    if is_waiting:
        role.wait_until(
            lambda: state.completed > before,
            f"named barrier {number} with {state.arrived} threads",
        )
        role.clock.join(state.released)
    else:
        role.pause()


GL = SimpleNamespace(
    int32=gl.int32,
    int16=gl.int16,
    int64=gl.int64,
    int1=gl.int1,
    float16=gl.float16,
    bfloat16=gl.bfloat16,
    float32=gl.float32,
    pointer_type=gl.pointer_type,
    NVMMASharedLayout=gl.NVMMASharedLayout,
    SwizzledSharedLayout=gl.SwizzledSharedLayout,
    SliceLayout=_layout,
    BlockedLayout=_layout,
    NVMMADistributedLayout=_layout,
    DotOperandLayout=_layout,
    constexpr=lambda value: value,
    to_tensor=lift,
    static_range=range,
    arange=arange,
    full=full,
    zeros=zeros,
    full_like=full_like,
    load=load,
    store=store,
    atomic_add=atomic_add,
    expand_dims=expand_dims,
    broadcast=broadcast,
    reshape=reshape,
    join=join,
    split=split,
    convert_layout=convert_layout,
    multiple_of=multiple_of,
    where=where,
    maximum=maximum,
    minimum=minimum,
    exp2=_unary(torch.exp2),
    exp=_unary(torch.exp),
    log2=_unary(torch.log2),
    log=_unary(torch.log),
    fma=fma,
    sum=gl_sum,
    max=gl_max,
    min=gl_min,
    associative_scan=associative_scan,
    program_id=program_id,
    num_programs=num_programs,
    num_warps=num_warps,
    static_assert=static_assert,
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=warp_specialize,
    barrier=barrier,
    thread_barrier=barrier,
)
"""In place of `triton.experimental.gluon.language`."""
MBARRIER = SimpleNamespace(
    init=barrier_init,
    expect=barrier_expect,
    arrive=barrier_arrive,
    wait=barrier_wait,
    MBarrierLayout=_layout,
)
TMA = SimpleNamespace(store_wait=store_wait)

__all__ = ["GL", "MBARRIER", "TMA", "Memory", "compare"]
