"""What the names of Gluon's modules are in the interpreter, and the operations on a program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from . import asynchronous, operations
from .machine import current_role
from .operations import unary
from .shared_memory import Buffer, SharedView
from .values import TORCH_DTYPES, InterpreterError, Value, lift


def _layout(*args: Any, **kwargs: Any) -> None:
    """Return nothing: layouts of registers have no meaning here."""


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
    """Let others run: the threads of a role act as one here, but for the stores of `atomic_add`."""
    current_role().has_stored = False
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
    arange=operations.arange,
    full=operations.full,
    full_like=operations.full_like,
    zeros=operations.zeros,
    load=operations.load,
    store=operations.store,
    atomic_add=operations.atomic_add,
    expand_dims=operations.expand_dims,
    broadcast=operations.broadcast,
    reshape=operations.reshape,
    join=operations.join,
    split=operations.split,
    convert_layout=operations.convert_layout,
    multiple_of=operations.multiple_of,
    where=operations.where,
    maximum=operations.maximum,
    minimum=operations.minimum,
    exp2=unary(torch.exp2),
    log2=unary(torch.log2),
    fma=operations.fma,
    sum=operations.gl_sum,
    max=operations.gl_max,
    min=operations.gl_min,
    associative_scan=operations.associative_scan,
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
TL = SimpleNamespace(
    **vars(GL),
    abs=unary(torch.abs),
    cast=lambda value, dtype: lift(value).to(dtype),
    cdiv=lambda left, right: (left + (right - 1)) // right,
    ceil=unary(torch.ceil),
    cumsum=operations.cumsum,
    debug_barrier=barrier,
    exp=unary(torch.exp),
    uint8=gl.uint8,
    float8e4nv=gl.float8e4nv,
    float8e5=gl.float8e5,
)
"""In place of `triton.language`, for functions that kernels in Gluon share with those in Triton."""
MBARRIER = SimpleNamespace(
    init=asynchronous.barrier_init,
    expect=asynchronous.barrier_expect,
    arrive=asynchronous.barrier_arrive,
    wait=asynchronous.barrier_wait,
    MBarrierLayout=_layout,
)
TMA = SimpleNamespace(store_wait=asynchronous.store_wait)
