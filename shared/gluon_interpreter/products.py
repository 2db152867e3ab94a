"""Asynchronous products of a warpgroup, and their accumulators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .places import Place, current_place
from .shared_memory import SharedView
from .values import InterpreterError, Value


@dataclass
class Product:
    """A warpgroup_mma that was issued.

    Args:
        left: its left operand in shared memory, or a value in registers.
        right: its right operand in shared memory.
        acc: Optional. The accumulator. If None, it is not added.
        seen: the operands when it was issued.
        result: the value that becomes valid.
        place: the line that has issued it.
    """

    left: SharedView | Value
    right: SharedView
    acc: Value | None
    seen: tuple[torch.Tensor, torch.Tensor]
    result: ProductValue
    place: Place = field(default_factory=current_place)

    def finish(self, note: Callable[..., None]) -> None:
        """Compute the product, from operands that must be as they were when it was issued.

        Args:
            note: `WarpRole.note` of the role that has issued it.
        """
        for operand, seen in zip((self.left, self.right), self.seen, strict=True):
            if isinstance(operand, SharedView):
                note(operand, is_store=False)
                if same_bits(operand.read(), seen):
                    continue
                raise InterpreterError(
                    "an operand of warpgroup_mma was overwritten before the product was waited for",
                    "race",
                    others=[("the product is issued", self.place)],
                )
        left, right = (operand.float() for operand in self.seen)
        total = left @ right
        if self.acc is not None:
            total = total + self.acc.tensor
        self.result.become(total)


class ProductValue(Value):
    """The accumulator of a product that may be in flight."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__(None, gl.float32)
        self._sizes = shape

    @property
    def shape(self) -> list[int]:
        """The sizes."""
        return self._sizes

    @property
    def data(self) -> Any:
        """The numbers.

        Raises:
            InterpreterError: the product was not waited for.
        """
        if self._data is None:
            raise InterpreterError(
                "an accumulator is used before warpgroup_mma_wait has ended its product",
                "missing wait",
            )
        return self._data

    def become(self, data: torch.Tensor) -> None:
        """Make the value valid."""
        self._data = data


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    return torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )
