"""Puzzle: a function to write, the small cases on which it is checked, and the hints.

A case is a dictionary of arguments. `right` and the wrong answers of the hints are functions with
the same arguments as the function to write, so that all answers are compared in the same way.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]
"""Arguments of one call: tensors, numbers and lists."""
Function = Callable[..., Any]
UNUSED = 99.0
"""The number between the elements of a tensor that is not contiguous."""


@dataclass(frozen=True)
class Hint:
    """A usual mistake, which is recognized by its results.

    Args:
        name: Identifier, such as "block_edge".
        text: The idea that the mistake misses, without code.
        wrong: The results of the mistake, from the same arguments. It may raise the error that the
            mistake causes.
    """

    name: str
    text: str
    wrong: Function


@dataclass(frozen=True)
class Puzzle:
    """One puzzle.

    Args:
        number: Its position, from 1. The difficulty rises.
        name: Name of the function to write.
        title: What the function computes, in a few words.
        page: The documentation page that teaches it, without ".md".
        template: Text of the file that is written for the user.
        results: Name of each returned tensor, and names of its axes.
        cases: Returns the cases, smallest first.
        right: The right answer.
        hints: The usual mistakes.
        idea: The hint if no usual mistake has these results.
        modified: Name of each argument that is modified in place, and names of its axes.
        call: Optional. Calls the function with a case. If None, the case is passed by keyword.
        operations: Optional. Returns operations of pagetwin, by name, that call the function. If
            None, no law is tried.
        laws: Sentences of the laws that those operations must satisfy.
        law_hint: The hint if all cases are right and a law is broken.
        has_strides: Whether the cases are tried with tensors that are not contiguous too.
    """

    number: int
    name: str
    title: str
    page: str
    template: str
    results: dict[str, tuple[str, ...]]
    cases: Callable[[], Iterable[Case]]
    right: Function
    hints: tuple[Hint, ...]
    idea: str
    modified: dict[str, tuple[str, ...]] = field(default_factory=dict)
    call: Callable[[Function, Case], Any] | None = None
    operations: Callable[[Function], dict[str, Function]] | None = None
    laws: tuple[str, ...] = ()
    law_hint: str = ""
    has_strides: bool = True

    @property
    def file(self) -> str:
        """The name of its file, such as "01_slot_mapping.py"."""
        return f"{self.number:02}_{self.name}.py"

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the names of the axes of a result or of a modified argument."""
        return (self.modified | self.results)[name]


def copy_of(value: Any) -> Any:
    """Return a copy of an argument, with copies of its tensors and lists."""
    return with_tensors(
        lambda tensor: tensor.clone() if tensor.is_contiguous() else strided(tensor),
        value,
    )


def case_with_strides(case: Case) -> Case:
    """Return a case with equal tensors that are not contiguous."""
    return {name: with_tensors(strided, value) for name, value in case.items()}


def with_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return an argument with other tensors, also inside of lists and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(change, element) for element in value)
    return value


def strided(tensor: Tensor) -> Tensor:
    """Return an equal tensor that is not contiguous: a part of a larger one along every axis."""
    sizes = [size + 1 for size in tensor.shape]
    larger = torch.full([*sizes, 2], UNUSED).to(tensor.dtype)[..., 0]
    part = larger[tuple(map(slice, tensor.shape))]
    return part.copy_(tensor)


def small_numbers(*shape: int, seed: int = 0, low: int = -1, high: int = 2) -> Tensor:
    """Return a float32 tensor of small integers, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).float()


def counted(*shape: int, start: int = 1) -> Tensor:
    """Return a float32 tensor of the integers from `start`, all different."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).float().view(shape)
