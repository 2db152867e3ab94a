"""Comparators of the laws: each one raises a Disagreement if a result is not the expected one.

A Disagreement shows the found and the expected value at the element with the largest error.
Integers, bytes and errors must be equal. Floating-point results have an error budget per row.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...contract.budgets import judge_rows
from ..base.support import OutsideSupport
from .pictures import Failure

INPUT_ERRORS = (ValueError, IndexError, TypeError, NotImplementedError, KeyError)
"""Errors that report invalid input."""


class Disagreement(AssertionError):
    """A broken law: what was compared, the index of the largest error, and both values there.

    Args:
        what: The result that was compared, in words.
        where: The index of the element, in words.
        found: The candidate's value of that element.
        right: The expected value.
        failure: Optional. The call and its result, of which a report shows a picture. If None, the
            report has no picture.
    """

    def __init__(
        self,
        what: str,
        where: str,
        found: object,
        right: object,
        failure: Failure | None = None,
    ) -> None:
        super().__init__(f"{what}, {where}: {found}, right is {right}")
        self.what, self.where = what, where
        self.found, self.right = str(found), str(right)
        self.failure = failure


def expect_same(what: str, found: Any, right: Any) -> None:
    """Raise a Disagreement if a number, list, tensor or None is not exactly the expected one.

    Tensors must have the same shape, dtype and bytes. NaN equals a NaN of the same bytes.
    """
    if isinstance(right, Tensor):
        _expect_same_tensor(what, found, right)
        return
    if isinstance(right, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(right):
            raise Disagreement(what, "as a whole", found, right)
        for index, (one, other) in enumerate(zip(found, right, strict=True)):
            expect_same(f"{what}[{index}]", one, other)
        return
    is_flag = type(found) is bool, type(right) is bool
    if isinstance(found, Tensor) or is_flag[0] != is_flag[1] or found != right:
        raise Disagreement(what, "as a whole", repr(found), repr(right))


def _expect_same_tensor(what: str, found: Any, right: Tensor) -> None:
    if not isinstance(found, Tensor):
        raise Disagreement(what, "as a whole", repr(found), "a tensor")
    for name in ("shape", "dtype"):
        one, other = getattr(found, name), getattr(right, name)
        if one != other:
            raise Disagreement(what, f"its {name}", one, other)
    found, right = found.cpu(), right.cpu()
    same = bytes_of(found) == bytes_of(right)
    if bool(same.all()):
        return
    index = tuple(same.all(-1).logical_not().nonzero()[0].tolist())
    raise Disagreement(
        what, f"at {list(index)}", found[index].item(), right[index].item()
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return [..., bytes per element] of a tensor on the host. As bytes, NaN equals itself."""
    # an axis of size 1 may have any stride, and such a tensor cannot be viewed as bytes
    packed = tensor.clone(memory_format=torch.contiguous_format)
    flat = packed.view(*tensor.shape, 1)
    return flat.view(torch.uint8)


def expect_budget(
    what: str,
    found: Tensor,
    exact: Tensor,
    same_dtype: Tensor,
    magnitude: Tensor | None = None,
    lost_in_sums: Tensor | None = None,
    moved_by_scores: Tensor | None = None,
    value_range: Tensor | None = None,
) -> None:
    """Raise a Disagreement if a row exceeds its error budget (`shared.contract.budgets`).

    Args:
        what: The result that is compared, in words.
        found: [rows, ...] The candidate's result.
        exact: [rows, ...] The exact result in float64.
        same_dtype: [rows, ...] The result of plain torch in the dtype that the candidate's result
            must have.
        magnitude, lost_in_sums, moved_by_scores, value_range: Arguments of `judge_rows`.
    """
    if found.shape != exact.shape:
        raise Disagreement(what, "its shape", list(found.shape), list(exact.shape))
    if found.dtype != same_dtype.dtype:
        raise Disagreement(what, "its dtype", found.dtype, same_dtype.dtype)
    on_host = [
        None if tensor is None else tensor.cpu()
        for tensor in (
            same_dtype,
            magnitude,
            lost_in_sums,
            moved_by_scores,
            value_range,
        )
    ]
    found, exact = found.cpu(), exact.cpu()
    assert on_host[0] is not None
    verdict = judge_rows(found, exact, on_host[0], found.dtype, *on_host[1:])
    if verdict.ok:
        return
    row = verdict.row
    off = (found[row].double() - exact[row].double()).abs().nan_to_num(torch.inf)
    index = _index_of_largest(off)
    raise Disagreement(
        what,
        f"at {[row, *index]}{budgets(verdict.worst)}",
        found[row][index].item(),
        exact[row][index].item(),
    )


def budgets(share: float, whose: str = "the row's") -> str:
    """Return an error in error budgets, as the end of a sentence. NaN and infinity have none."""
    return f", {share:.3g} times {whose} budget" if math.isfinite(share) else ""


def _index_of_largest(tensor: Tensor) -> tuple[int, ...]:
    axes, flat = [], int(tensor.argmax()) if tensor.numel() else 0
    for size in reversed(tensor.shape):
        axes.append(flat % size)
        flat //= size
    return tuple(reversed(axes))


def expect_rejection(
    what: str, call: Callable[[], Any], unchanged: dict[str, Tensor] | None = None
) -> None:
    """Raise a Disagreement if a call with invalid input returns, or writes before it raises.

    Args:
        what: The input, in words.
        call: The call. It must raise a ValueError, IndexError, TypeError, NotImplementedError or
            KeyError.
        unchanged: Optional. Tensors that the call must not change, by name. If None, no tensor is
            compared.

    Raises:
        OutsideSupport: The call is outside of the declared support, so that the error says nothing
            about the validation of the input.
    """
    before = {name: tensor.clone() for name, tensor in (unchanged or {}).items()}
    try:
        found = call()
    except OutsideSupport:
        raise
    except INPUT_ERRORS:
        for name, tensor in before.items():
            expect_same(f"{name} after the rejection", (unchanged or {})[name], tensor)
        return
    raise Disagreement(
        what, "as a whole", f"returned {type(found).__name__}", "an error"
    )


def expect_untimely(what: str, call: Callable[[], Any]) -> None:
    """Raise a Disagreement if a call returns that is made too early or too late.

    Args:
        what: The call, in words.
        call: The call. It must raise a RuntimeError. NotImplementedError, a subclass, is passed
            on, because it means that the call is never possible.
    """
    try:
        found = call()
    except NotImplementedError:
        raise
    except RuntimeError:
        return
    raise Disagreement(
        what, "as a whole", f"returned {type(found).__name__}", "a RuntimeError"
    )
