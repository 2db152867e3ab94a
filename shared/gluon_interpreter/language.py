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


def allocate_shared_memory(
    element_ty: Any, shape: Any, layout: Any, value: Value | None = None
) -> SharedView:
    """Return a new buffer of shared memory, which has the numbers of a tile if one is given."""
    dtype = element_ty
    sizes = [int(size) for size in shape]
    buffer = Buffer(math.prod(sizes) * TORCH_DTYPES[dtype].itemsize)
    current_role().machine.buffers.append(buffer)
    view = SharedView(buffer, dtype, sizes, layout)
    if value is not None:
        view.store(value)
    return view


def allocate_mbarrier(batch: int | None = None, two_ctas: bool = False) -> SharedView:
    """Return new mbarriers, one or a batch, which have to be initialized."""
    return allocate_shared_memory(gl.int64, [1] if batch is None else [batch, 1], None)


def reinterpret(buffer: SharedView, dtype: Any, shape: Any, layout: Any) -> SharedView:
    """Return a view of the same bytes."""
    return buffer.reinterpret(dtype, shape, layout)


def warp_specialize(
    functions: list[tuple[Any, Any]], worker_warps: list[int], registers: Any = None
) -> None:
    """Run the roles of a program."""
    role = current_role()
    expected = len(functions) - 1
    for given in (worker_warps, worker_warps if registers is None else registers):
        if len(given) != expected:
            raise InterpreterError(
                f"warp_specialize of {len(functions)} functions with {given}: expected {expected}"
                " numbers, one per worker"
            )
    role.machine.run_roles(functions, [role.num_warps, *worker_warps])


def barrier(cluster: bool = False) -> None:
    """Let others run: the threads of a role act as one here, but for the stores of `atomic_add`."""
    current_role().has_stored = False
    current_role().pause()


MAX_ITERATIONS = 10_000
"""Iterations of a loop, at most. Those of the tests have a few tens."""


class Range:
    """The loop counter of a kernel: an int32 value that divides as C does."""

    def __init__(self, *bounds: Any) -> None:
        self._numbers = range(*(int(bound) for bound in bounds))
        if len(self._numbers) > MAX_ITERATIONS:
            raise InterpreterError(
                f"a loop of {len(self._numbers)} iterations", "deadlock"
            )

    def __iter__(self) -> Iterator[Value]:
        return (Value(number, gl.int32) for number in self._numbers)


class Module(SimpleNamespace):
    """Operations in place of those of a module."""

    def __getattr__(self, name: str) -> Any:
        """Raise `NotImplementedError`: the interpreter does not have this operation."""
        raise NotImplementedError(f"the Gluon interpreter does not know {name}")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: what is promised to the compiler, or printed, changes no result."""


def first(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the first argument: the others are promised to the compiler."""
    return value


def device_assert(condition: Any, message: str = "", mask: Any = None) -> None:
    """Raise `InterpreterError` if a condition does not hold everywhere."""
    holds = (
        lift(condition).tensor.bool()
        | ~lift(True if mask is None else mask).tensor.bool()
    )
    if not bool(holds.all()):
        raise InterpreterError(f"device_assert: {message}")


GL = Module(
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
    gather=operations.gather,
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
    abs=unary(torch.abs),
    add=lambda left, right: lift(left) + right,
    assume=nothing,
    cast=lambda value, dtype: lift(value).to(dtype),
    cdiv=lambda left, right: (left + (right - 1)) // right,
    ceil=unary(torch.ceil),
    cos=unary(torch.cos),
    device_assert=device_assert,
    device_print=nothing,
    erf=unary(torch.erf),
    exp=unary(torch.exp),
    floor=unary(torch.floor),
    float8e4nv=gl.float8e4nv,
    float8e5=gl.float8e5,
    float64=gl.float64,
    int8=gl.int8,
    log=unary(torch.log),
    max_constancy=first,
    max_contiguous=first,
    mul=lambda left, right: lift(left) * right,
    num_ctas=lambda: 1,
    permute=lambda value, order: value.permute(order),
    rsqrt=unary(torch.rsqrt),
    set_auto_layout=first,
    sin=unary(torch.sin),
    sqrt=unary(torch.sqrt),
    static_print=nothing,
    sub=lambda left, right: lift(left) - right,
    uint8=gl.uint8,
    zeros_like=lambda value: operations.full_like(value, 0),
    AutoLayout=_layout,
    CoalescedLayout=_layout,
    DistributedLinearLayout=_layout,
)
"""In place of `triton.experimental.gluon.language`."""
TL = Module(
    **vars(GL),
    cumsum=operations.cumsum,
    debug_barrier=barrier,
    dot=operations.dot,
    # launches run one after another here
    extra=Module(cuda=Module(gdc_wait=nothing, gdc_launch_dependents=nothing)),
)
"""In place of `triton.language`, for functions that kernels in Gluon share with those in Triton."""
MBARRIER = Module(
    allocate_mbarrier=allocate_mbarrier,
    invalidate=asynchronous.barrier_invalidate,
    init=asynchronous.barrier_init,
    expect=asynchronous.barrier_expect,
    arrive=asynchronous.barrier_arrive,
    wait=asynchronous.barrier_wait,
    MBarrierLayout=_layout,
)
TMA = Module(
    store_wait=asynchronous.store_wait,
    async_load=asynchronous.async_load,
    async_store=asynchronous.async_store,
    # the names of triton 3.6 and 3.7
    async_copy_global_to_shared=asynchronous.async_load,
    async_copy_shared_to_global=asynchronous.async_store,
)
ASYNC_COPY = Module(
    async_copy_global_to_shared=asynchronous.copy_elements,
    async_load=asynchronous.copy_elements,
    commit_group=asynchronous.commit_group,
    mbarrier_arrive=asynchronous.arrive_after_copies,
    wait_group=asynchronous.wait_group,
)
AMPERE = Module(async_copy=ASYNC_COPY, mbarrier=MBARRIER, mma_v2=operations.mma_v2)
HOPPER = Module(
    **vars(AMPERE),
    tma=TMA,
    fence_async_shared=asynchronous.fence_async_shared,
    warpgroup_mma=asynchronous.warpgroup_mma,
    warpgroup_mma_init=first,
    warpgroup_mma_wait=asynchronous.warpgroup_mma_wait,
)
