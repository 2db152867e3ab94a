"""How does a law say that two answers differ?

Each function compares one answer of the candidate with what is right and raises a Disagreement that
shows both at the worst place. Integers, bytes and errors must be equal; arithmetic has a budget a
row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...contract.budgets import judge_rows
from .candidate import OutsideSupport

REFUSALS = (ValueError, IndexError, TypeError, NotImplementedError, KeyError)
"""What says that an input makes no sense."""


class Disagreement(AssertionError):
    """A broken law: what was compared, where it is worst, and both answers there.

    Args:
        what: the answer in question.
        where: the place, in words.
        found: the candidate's answer there.
        right: what it should be.
    """

    def __init__(self, what: str, where: str, found: object, right: object) -> None:
        super().__init__(f"{what}, {where}: {found}, right is {right}")
        self.what, self.where = what, where
        self.found, self.right = str(found), str(right)


def expect_same(what: str, found: Any, right: Any) -> None:
    """Refuse an answer that is not exactly the right one: numbers, lists, tensors, None.

    Tensors must have the same shape, dtype and bytes; NaN equals the same NaN.
    """
    if isinstance(right, Tensor):
        _expect_same_tensor(what, found, right)
        return
    if isinstance(right, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(right):
            raise Disagreement(what, "as a whole", found, right)
        for place, (one, other) in enumerate(zip(found, right, strict=True)):
            expect_same(f"{what}[{place}]", one, other)
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
    place = tuple(same.all(-1).logical_not().nonzero()[0].tolist())
    raise Disagreement(
        what, f"at {list(place)}", found[place].item(), right[place].item()
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return [..., bytes of an element] of a tensor on the host, in which NaN equals itself."""
    # an axis of one element may keep any stride, which a view of bytes does not take
    packed = tensor.clone(memory_format=torch.contiguous_format)
    flat = packed.view(*tensor.shape, 1)
    return flat.view(torch.uint8)


def expect_budget(
    what: str,
    found: Tensor,
    exact: Tensor,
    same_dtype: Tensor,
    magnitude: Tensor | None = None,
    joined_lse: Tensor | None = None,
) -> None:
    """Refuse rows that lost more than plain torch may lose (`shared.budgets`).

    Args:
        what: the answer in question.
        found: [rows, ...] the candidate's.
        exact: [rows, ...] in float64.
        same_dtype: [rows, ...] plain torch's in the candidate's dtype.
        magnitude, joined_lse: what `judge_rows` takes.
    """
    if found.shape != exact.shape:
        raise Disagreement(what, "its shape", list(found.shape), list(exact.shape))
    on_host = [
        None if each is None else each.cpu()
        for each in (same_dtype, magnitude, joined_lse)
    ]
    found, exact = found.cpu(), exact.cpu()
    assert on_host[0] is not None
    verdict = judge_rows(found, exact, on_host[0], found.dtype, *on_host[1:])
    if verdict.ok:
        return
    row = verdict.row
    off = (found[row].double() - exact[row].double()).abs().nan_to_num(torch.inf)
    place = _place_of_largest(off)
    raise Disagreement(
        what,
        f"at {[row, *place]}, {verdict.worst:.3g} of the row's budget",
        found[row][place].item(),
        exact[row][place].item(),
    )


def _place_of_largest(tensor: Tensor) -> tuple[int, ...]:
    place, index = [], int(tensor.argmax()) if tensor.numel() else 0
    for size in reversed(tensor.shape):
        place.append(index % size)
        index //= size
    return tuple(reversed(place))


def expect_refusal(
    what: str, call: Callable[[], Any], unchanged: dict[str, Tensor] | None = None
) -> None:
    """Refuse a call that returns though its input makes no sense, or writes before it raises.

    Args:
        what: the input, in words.
        call: what must raise a ValueError, IndexError, TypeError or NotImplementedError.
        unchanged: tensors that must be as they were afterwards, by name.

    Raises:
        OutsideSupport: it refused something else than the input: what it does not declare.
    """
    before = {name: each.clone() for name, each in (unchanged or {}).items()}
    try:
        found = call()
    except OutsideSupport:
        raise
    except REFUSALS:
        for name, each in before.items():
            expect_same(f"{name} after the refusal", (unchanged or {})[name], each)
        return
    raise Disagreement(
        what, "as a whole", f"returned {type(found).__name__}", "an error"
    )


def expect_untimely(what: str, call: Callable[[], Any]) -> None:
    """Refuse a call that returns though its time has not come, or is over.

    Args:
        what: the call, in words.
        call: what must raise a RuntimeError. NotImplementedError is one too, and says something
            else: that there will never be a time.
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
