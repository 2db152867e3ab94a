"""Shared memory of the Gluon interpreter: buffers of bytes, and views with a swizzled layout.

Two views of one buffer agree only if the order of their bytes is that of the hardware, so the order
is computed: a tile of 128-byte rows in which the 16-byte units of a row change places with the
row's number, and wider tiles as one such tile after another.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .accesses import LOCAL, Accesses
from .values import TORCH_DTYPES, InterpreterError, Value, of_tensor

UNIT, ROW_BYTES = 16, 128
UNWRITTEN, WRITTEN, IN_FLIGHT = 0, 1, 2


class Buffer:
    """An allocation.

    Attributes:
        raw: its bytes. They are NaN in every dtype before they are written.
        unfenced: for each byte the number of the role, plus 1, whose ordinary store has not been
            fenced for the asynchronous proxy; 0 otherwise.
        fenced_by: for each byte that is not fenced the roles that have fenced it for themselves, a
            bit per role.
        states: for each byte UNWRITTEN, WRITTEN or IN_FLIGHT.
        accesses: which role has loaded and stored what.
    """

    def __init__(self, num_bytes: int) -> None:
        self.raw = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self.unfenced = torch.zeros(num_bytes, dtype=torch.uint8)
        self.fenced_by = torch.zeros(num_bytes, dtype=torch.uint8)
        self.states = torch.full((num_bytes,), UNWRITTEN, dtype=torch.uint8)
        self.accesses = Accesses(num_bytes)


@cache
def tile_order(shape: tuple[int, ...], layout: Any, item_bytes: int) -> torch.Tensor:
    """Return the place of each element of a tile, in elements.  # [*shape]

    Args:
        shape: sizes; the last one is that of the columns.
        layout: NVMMASharedLayout, or another one, which is taken as linear.
        item_bytes: bytes per element.
    """
    numbers = torch.arange(math.prod(shape))
    if not isinstance(layout, gl.NVMMASharedLayout):
        return numbers.view(shape)
    if layout.transposed:
        order: torch.Tensor = tile_order(shape[::-1], _untransposed(layout), item_bytes)
        return order.permute(*range(len(shape))[::-1])
    if not layout.swizzle_byte_width:
        return numbers.view(shape)
    width = layout.swizzle_byte_width
    columns = width // item_bytes
    assert shape[-1] % columns == 0, (shape, layout)
    row, column = numbers // shape[-1], numbers % shape[-1]
    rows = math.prod(shape[:-1])
    byte = (column // columns * rows + row) * width + column % columns * item_bytes
    swizzled = byte ^ (byte // ROW_BYTES % (width // UNIT) * UNIT)
    places: torch.Tensor = (swizzled // item_bytes).view(shape)
    return places


def _untransposed(layout: Any) -> Any:
    return gl.NVMMASharedLayout(
        layout.swizzle_byte_width, layout.element_bitwidth, layout.rank
    )


class SharedView:
    """A shared-memory descriptor.

    Args:
        buffer: the allocation.
        dtype: Triton dtype of its elements.
        shape: sizes.
        layout: shared-memory layout of the last dimensions.
        first: place of the first element, in elements.
        order: Optional. [*shape] place of each element after `first`. If None, it follows from the
            layout.
    """

    def __init__(
        self,
        buffer: Buffer,
        dtype: Any,
        shape: list[int],
        layout: Any,
        first: int = 0,
        order: torch.Tensor | None = None,
    ) -> None:
        self.buffer, self.dtype, self.shape = buffer, dtype, list(shape)
        self.layout, self.first, self._order = layout, first, order
        self._is_whole = order is None
        self.item_bytes = TORCH_DTYPES[dtype].itemsize

    @property
    def rank(self) -> int:
        """Dimensions that the layout orders."""
        return getattr(self.layout, "rank", 1)

    def order(self) -> torch.Tensor:
        """Return the place of each element in the buffer, in elements.  # [*shape]"""
        if self._order is None:
            tile = tuple(self.shape[-self.rank :])
            lead = math.prod(self.shape[: -self.rank])
            one = tile_order(tile, self.layout, self.item_bytes)
            steps = torch.arange(lead) * one.numel()
            self._order = (steps[:, None] + one.flatten()).view(self.shape)
        return self._order + self.first

    def index(self, number: Any) -> SharedView:
        """Return one of the tiles along the first dimension."""
        number = int(number)
        if not 0 <= number < self.shape[0]:
            raise InterpreterError(
                f"shared memory at index {number}: expected 0 to {self.shape[0] - 1}",
                "out of bounds",
            )
        first = self.first + number * math.prod(self.shape[1:])
        return SharedView(self.buffer, self.dtype, self.shape[1:], self.layout, first)

    def slice(self, start: Any, length: int, dim: int = 0) -> SharedView:
        """Return a range along one dimension."""
        start = int(start)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise InterpreterError(
                f"shared memory from {start} to {start + length}: expected 0 to {self.shape[dim]}",
                "out of bounds",
            )
        order = (self.order() - self.first).narrow(dim, start, length)
        return SharedView(
            self.buffer, self.dtype, list(order.shape), self.layout, self.first, order
        )

    def permute(self, dims: tuple[int, ...]) -> SharedView:
        """Return the view with its dimensions in another order."""
        order = (self.order() - self.first).permute(dims)
        return SharedView(
            self.buffer, self.dtype, list(order.shape), self.layout, self.first, order
        )

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> SharedView:
        """Return the same bytes in another dtype, shape and layout."""
        assert self._is_whole, "a view of some rows or columns has no order of bytes"
        view = SharedView(self.buffer, dtype, [int(size) for size in shape], layout)
        if math.prod(view.shape) * view.item_bytes != (
            math.prod(self.shape) * self.item_bytes
        ):
            raise InterpreterError(
                f"{self.shape} of {self.dtype} reinterpreted as {shape} of {dtype}: expected as"
                " many bytes"
            )
        view.first = self.first * self.item_bytes // view.item_bytes
        return view

    _reinterpret = reinterpret

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def type(self) -> SimpleNamespace:
        """What a kernel asks about the type of a descriptor."""
        return SimpleNamespace(
            element_ty=self.dtype, shape=self.shape, layout=self.layout
        )

    def _keep_alive(self) -> None:
        """Do nothing: no allocation ends before its program here."""

    def _elements(self) -> torch.Tensor:
        return self.buffer.raw.view(TORCH_DTYPES[self.dtype])

    def read(self) -> torch.Tensor:
        """Return a copy of the elements.  # [*shape]"""
        return self._elements()[self.order()]

    def write(self, tensor: torch.Tensor, role: int | None) -> None:
        """Store elements.

        Args:
            tensor: [*shape] or a number for all.
            role: number of the role that stores them; None for the asynchronous proxy.
        """
        order = self.order()
        tensor = tensor.to(TORCH_DTYPES[self.dtype])
        self._elements()[order] = tensor.expand(order.shape)
        marks = self.buffer.unfenced.view(-1, self.item_bytes)
        marks[order] = 0 if role is None else role + 1
        self.buffer.fenced_by.view(-1, self.item_bytes)[order] = 0
        self.buffer.states.view(-1, self.item_bytes)[order] = WRITTEN

    def poison(self) -> None:
        """Fill the view with NaN: an asynchronous copy may write it at any time from now on."""
        bytes_of = self.buffer.raw.view(-1, self.item_bytes)
        order = self.order()
        bytes_of[order] = 0xFF
        self.buffer.unfenced.view(-1, self.item_bytes)[order] = 0
        self.buffer.states.view(-1, self.item_bytes)[order] = IN_FLIGHT

    def is_in_flight(self) -> bool:
        """Return whether an asynchronous copy may still write a part of the view."""
        states = self.buffer.states.view(-1, self.item_bytes)[self.order()]
        return bool((states == IN_FLIGHT).any())

    def check_written(self, reader: str) -> None:
        """Raise `InterpreterError` if a part of the view was not written yet."""
        states = self.buffer.states.view(-1, self.item_bytes)[self.order()]
        if bool((states == IN_FLIGHT).any()):
            raise InterpreterError(
                f"{reader} reads shared memory that an asynchronous copy has not filled yet:"
                " expected a wait for the copy between",
                "missing wait",
            )
        if bool((states == UNWRITTEN).any()):
            raise InterpreterError(
                f"{reader} reads shared memory that was never written: expected a store or a copy"
                " before it",
                "uninitialized read",
            )

    def check_fenced(self, reader: str) -> None:
        """Raise `InterpreterError` if ordinary stores are not yet visible to the async proxy."""
        if not bool(self.buffer.unfenced.any()):
            return
        order = self.order()
        marks = self.buffer.unfenced.view(-1, self.item_bytes)[order]
        fenced_by = self.buffer.fenced_by.view(-1, self.item_bytes)[order]
        marks = marks * (fenced_by >> LOCAL.role.number & 1 == 0)
        if bool(marks.any()):
            raise InterpreterError(
                f"{reader} reads shared memory that role {int(marks.max()) - 1} has stored to:"
                " expected fence_async_shared() between",
                "missing fence",
            )

    def load(self, layout: Any = None) -> Value:
        """Return the elements as a value."""
        role = LOCAL.role
        role.pause()
        role.note(self, is_store=False)
        return of_tensor(self.read())

    def store(self, value: Value) -> None:
        """Store a value by ordinary stores."""
        role = LOCAL.role
        role.pause()
        if value.dtype != self.dtype:
            raise InterpreterError(
                f"a store of {value.dtype} to shared memory: expected {self.dtype}"
            )
        role.note(self, is_store=True)
        self.write(value.tensor, role.number)
