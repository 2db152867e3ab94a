"""Barriers, asynchronous copies and products of Gluon, as plain functions."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from .accesses import Clock
from .barriers import Barrier, NamedBarrier
from .machine import MAX_ROLES, Copy, current_role
from .operations import load
from .products import Product, ProductValue, same_bits
from .shared_memory import SharedView
from .values import InterpreterError, Value, lift


def barrier_init(mbarrier: SharedView, count: int) -> None:
    """Initialize an mbarrier.

    Raises:
        InterpreterError: the count is outside of the range that PTX has for it.
    """
    if not 1 <= int(count) < 2**20:
        raise InterpreterError(
            f"mbarrier.init with the count {int(count)}: expected 1 or more"
        )
    view, machine = mbarrier, current_role().machine
    machine.barriers[id(view.buffer), view.first] = Barrier(
        int(count), int(count), Clock(MAX_ROLES), Clock(MAX_ROLES)
    )


def barrier_invalidate(mbarrier: SharedView) -> None:
    """End the use of an mbarrier."""
    machine = current_role().machine
    machine.barrier(mbarrier)
    del machine.barriers[id(mbarrier.buffer), mbarrier.first]


def barrier_expect(mbarrier: SharedView, bytes_per_cta: Any, pred: Any = True) -> None:
    """Arrive at an mbarrier, whose phase then also waits for so many bytes."""
    view, num_bytes = mbarrier, bytes_per_cta
    role = current_role()
    role.pause()
    if bool(lift(pred)):
        state = role.machine.barrier(view)
        state.expected += int(num_bytes)
        state.pending -= 1
        role.clock.release(state.arriving)
        state.advance()


def barrier_arrive(mbarrier: SharedView, count: int = 1, pred: Any = True) -> None:
    """Arrive at an mbarrier."""
    view = mbarrier
    role = current_role()
    role.pause()
    if bool(lift(pred)):
        state = role.machine.barrier(view)
        state.pending -= int(count)
        role.clock.release(state.arriving)
        state.advance()


def barrier_wait(
    mbarrier: SharedView, phase: Any, pred: Any = True, deps: Any = ()
) -> None:
    """Wait until the phase of a parity has completed."""
    view = mbarrier
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
    """Make stores to shared memory visible to copies and products.

    Those of the role to all that come after them, and those of other roles that a barrier has
    ordered before to its own.
    """
    role = current_role()
    for buffer in role.machine.buffers:
        marks = buffer.unfenced
        marks[marks == role.number + 1] = 0
        if bool(marks.any()):
            known = buffer.accesses.find_known_stores(role.clock)
            buffer.fenced_by[(marks > 0) & known] |= 1 << role.number


class TensorMap:
    """A tensor map in a kernel.

    Args:
        memory: the bytes at its address.
        shape, strides: sizes and steps in elements.
        box: sizes of a box in the kernel's types.
        layout: shared-memory layout of a box.
        true_box: Optional. The first sizes of the box that the map was encoded with. If None, those
            of `box`. The box has the first rows of its shared memory.
        padding: what is loaded for elements that do not exist.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        dtype: Any,
        shape: Any,
        strides: Any,
        box: Any,
        layout: Any,
        true_box: tuple[int, ...] | None = None,
        padding: float = 0.0,
    ) -> None:
        self.sizes = [*(true_box or box[:-1]), box[-1]]
        assert math.prod(self.sizes) <= math.prod(box), (self.sizes, box)
        self.plane = memory.as_strided(tuple(shape), tuple(strides))
        self.dtype, self.layout = dtype, layout
        self.shape, self.strides = list(shape), list(strides)
        self.block_shape, self.padding = list(box), padding
        self.nbytes_per_cta = math.prod(box) * memory.itemsize
        self.block_type = SimpleNamespace(
            shape=self.block_shape, element_ty=dtype, nbytes=self.nbytes_per_cta
        )

    def box(self, start: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the indices of the elements of a box, and which of them exist."""
        sizes = self.sizes
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

    def of_box(self, tile: torch.Tensor) -> torch.Tensor:
        """Return the part of a tile that a box has, in the shape of the box.  # [*sizes]"""
        rows = math.prod(self.sizes[:-1])
        return tile.flatten(0, -2)[:rows].view(self.sizes)


def async_load(
    tensor_desc: TensorMap,
    coord: Any,
    barrier: SharedView,
    result: SharedView,
    pred: Any = True,
    multicast: bool = False,
) -> None:
    """Issue the copy of a box to shared memory, which signals an mbarrier."""
    role, desc = current_role(), tensor_desc
    if not bool(lift(pred)):
        return
    if result.shape != desc.block_type.shape:
        raise InterpreterError(
            f"a box of {desc.block_type.shape} is loaded to shared memory of {result.shape}"
        )
    state = role.machine.barrier(barrier)
    index, exists = desc.box(coord)
    if bool(result.buffer.unfenced.any()):
        result.check_fenced("an asynchronous load overwrites what")
    if role.machine.reports_unwritten and result.is_in_flight():
        raise InterpreterError(
            "an asynchronous load overwrites what another one has not filled yet: expected a wait"
            " for that one between",
            "race",
        )
    role.note(result, is_store=True, is_async=True)
    result.poison()

    def run() -> None:
        # what the box does not have stays NaN
        tile = result.read()
        desc.of_box(tile).fill_(desc.padding)[exists] = desc.plane[index]
        result.write(tile, None)
        state.expected -= exists.numel() * desc.plane.element_size()
        state.advance()

    role.machine.copies.append(Copy(run, False, role))
    role.pause()


def async_store(tensor_desc: TensorMap, coord: Any, src: SharedView) -> None:
    """Issue the copy of a box from shared memory."""
    role, desc, source = current_role(), tensor_desc, src
    role.check_written(source, "an asynchronous store")
    source.check_fenced("an asynchronous store")
    if source.shape != desc.block_type.shape:
        raise InterpreterError(
            f"a box of {desc.block_type.shape} is stored from shared memory of {source.shape}"
        )
    index, exists = desc.box(coord)
    seen = source.read()

    def run() -> None:
        role.note(source, is_store=False)
        if not same_bits(source.read(), seen):
            raise InterpreterError(
                "shared memory was overwritten before it was stored asynchronously",
                "race",
            )
        desc.plane[index] = desc.of_box(seen)[exists]

    steps = zip(index, desc.plane.stride(), strict=True)
    places = sum(
        (coordinates * step for coordinates, step in steps),
        torch.zeros((), dtype=torch.int64),
    )
    role.machine.memory.note_store(desc.plane, places)
    role.machine.copies.append(Copy(run, True, role))
    role.pause()


def copy_elements(
    smem: SharedView, pointer: Any, mask: Any = None, **hints: Any
) -> None:
    """Issue copies of elements to shared memory; where the mask is off, of zeros."""
    role = current_role()
    numbers = load(pointer, mask, 0).tensor
    if smem.shape != list(numbers.shape):
        raise InterpreterError(
            f"elements of {list(numbers.shape)} are copied to shared memory of {smem.shape}"
        )
    role.note(smem, is_store=True)
    smem.poison()

    def run() -> None:
        smem.write(numbers, role.number)

    copy = Copy(run, False, role)
    role.machine.copies.append(copy)
    role.groups[-1].append(copy)


def commit_group() -> None:
    """End the role's open group of copies of elements."""
    current_role().groups.append([])


def wait_group(num_outstanding: Any = 0) -> None:
    """Wait until at most so many groups of the role are in flight."""
    role = current_role()
    role.pause()
    while len(role.groups) - 1 > int(num_outstanding):
        role.machine.finish_copies(role.groups.pop(0))


def arrive_after_copies(mbarrier: SharedView, increment_count: bool = True) -> None:
    """Arrive at an mbarrier with all threads when the role's copies of elements are done.

    Args:
        mbarrier: one mbarrier.
        increment_count: whether the phase has as many arrivals more. If not, they are among those
            of `mbarrier.init`.
    """
    role = current_role()
    role.pause()
    state = role.machine.barrier(mbarrier)
    num_threads = 32 * role.num_warps
    state.pending += num_threads * int(increment_count)
    earlier = [copy for copy in role.machine.copies if copy.role is role]
    role.clock.release(state.arriving)

    def run() -> None:
        role.machine.finish_copies([copy for copy in earlier if not copy.is_store])
        state.pending -= num_threads
        state.advance()

    role.machine.copies.append(Copy(run, False, role))


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
            role.check_written(operand, "warpgroup_mma")
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
        role.products.pop(0).finish(role.note)
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
