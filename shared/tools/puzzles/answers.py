"""Answers: the results of one call, and their first difference from the right results."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .puzzle import Case, Function, Puzzle, copy_of

TOLERANCE = 1e-5
"""Absolute and relative. In every case a wrong key changes some result by more than 1e-3."""


@dataclass(frozen=True)
class CallResult:
    """The results of one call.

    Args:
        results: Each modified argument and each result, by name.
        error: Optional. The error that the call raised. If None, it returned.
        changed: Names of the arguments that are only read and that the call changed.
        extra: Description of what was returned, if it has another number of results.
    """

    results: dict[str, Any]
    error: Exception | None = None
    changed: tuple[str, ...] = ()
    extra: str = ""


@dataclass(frozen=True)
class Difference:
    """The first difference of an answer from the right one.

    Args:
        kind: "error", "count", "type", "shape", "dtype", "value" or "changed".
        text: What differs, and where, in words.
    """

    kind: str
    text: str


def answer_of(puzzle: Puzzle, function: Function, case: Case) -> CallResult:
    """Return the answer of a function on a case, which is not modified."""
    given = {name: copy_of(value) for name, value in case.items()}
    try:
        found = puzzle.call(function, given) if puzzle.call else function(**given)
    except Exception as error:
        return CallResult({}, error)
    results = {name: given[name] for name in puzzle.modified}
    changed = tuple(
        name
        for name, value in case.items()
        if name not in puzzle.modified and not _equal(given[name], value)
    )
    returned = found if isinstance(found, tuple) else () if found is None else (found,)
    if len(returned) != len(puzzle.results):
        return CallResult(results, None, changed, _described(found))
    results |= dict(zip(puzzle.results, returned, strict=True))
    return CallResult(results, None, changed)


def first_difference(
    puzzle: Puzzle, found: CallResult, right: CallResult
) -> Difference | None:
    """Return the first difference of an answer from the right one, or None if it is right."""
    if found.error is not None:
        return Difference("error", sentence_of(found.error))
    if found.extra:
        names = ", ".join(puzzle.results) or "nothing"
        return Difference("count", f"it returned {found.extra}, expected {names}")
    for name, wanted in right.results.items():
        difference = _difference(puzzle, name, found.results[name], wanted)
        if difference is not None:
            return difference
    if found.changed:
        names = ", ".join(found.changed)
        return Difference("changed", f"the call changed {names}, which is only read")
    return None


def origin_of(error: BaseException) -> BaseException:
    """Return an error that a kernel raised, and not that of the interpreter which reports it."""
    while type(error).__name__ == "InterpreterError" and error.__cause__:
        error = error.__cause__
    return error


def sentence_of(error: BaseException) -> str:
    """Return the type of an error, and what it says."""
    origin = origin_of(error)
    return f"{type(origin).__name__}: {origin}"


def is_same(found: CallResult, other: CallResult) -> bool:
    """Return whether two answers have the same results, or raised the same type of error."""
    if found.error is not None or other.error is not None:
        return type(found.error) is type(other.error)
    if found.extra or other.extra or found.results.keys() != other.results.keys():
        return found.extra == other.extra
    return all(
        isinstance(value, Tensor)
        and value.dtype == other.results[name].dtype
        and value.shape == other.results[name].shape
        and not bool(differs(value, other.results[name]).any())
        for name, value in found.results.items()
    )


def differs(found: Tensor, right: Tensor) -> Tensor:
    """Return the elements that differ. Floats of 32 bits may differ by the tolerance."""
    if right.dtype == torch.float32 and found.dtype.is_floating_point:
        one, other = found.detach().double(), right.double()
        return ~torch.isclose(
            one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        )
    one, other = found.detach().double(), right.double()
    return (one != other) & ~(one.isnan() & other.isnan())


def _difference(
    puzzle: Puzzle, name: str, found: Any, right: Tensor
) -> Difference | None:
    axes = puzzle.axes(name)
    if not isinstance(found, Tensor):
        return Difference("type", f"{name} is {_described(found)}, expected a tensor")
    if found.shape != right.shape:
        words = ", ".join(axes)
        return Difference(
            "shape",
            f"{name} has shape {list(found.shape)}, expected {list(right.shape)} [{words}]",
        )
    if found.dtype != right.dtype:
        return Difference(
            "dtype",
            f"{name} has dtype {_short(found.dtype)}, expected {_short(right.dtype)}",
        )
    wrong = differs(found, right)
    if not bool(wrong.any()):
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    where = ", ".join(
        f"{axis} {entry}" for axis, entry in zip(axes, index, strict=True)
    )
    return Difference(
        "value",
        f"{name} at {where}: yours {number(found[index])}, right {number(right[index])}",
    )


def number(element: Tensor) -> str:
    """Return an element with at most four significant digits; 0 or 1 for a bool."""
    value = element.item()
    return f"{value:.4g}" if isinstance(value, float) else str(int(value))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and not bool(differs(one, other).any())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _described(found: Any) -> str:
    if found is None:
        return "None"
    if isinstance(found, tuple):
        return f"{len(found)} results"
    return f"one {type(found).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
