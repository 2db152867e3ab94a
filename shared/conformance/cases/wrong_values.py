"""Wrong values: what takes the place of a valid argument in a call that must raise.

Each value differs from the valid one in one thing: its type, its shape, its dtype, its device, a
number, or one element. Whether it is an error is for the contract of the operation.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Wrong(NamedTuple):
    """A value in the place of a valid one.

    Args:
        words: What is wrong with it. Equal for equal valid values.
        value: The value. A tensor with fewer rows or more axes is a view of the valid one.
        kind: "types", "forms" (the same numbers in another dtype), "shapes" (all that shapes,
            dtypes, devices and numbers show) or "contents" (elements).
    """

    words: str
    value: Any
    kind: str


_TYPES = (object(), None)
_NUMBERS: dict[type, tuple[Any, ...]] = {
    int: (-1, 2**70),
    float: (math.nan, -1.0, 2**70),
    bool: (),
}


def wrong_values(value: Any) -> Iterator[Wrong]:
    """Yield values for the place of a valid one; views of a tensor share its memory."""
    for other in _TYPES:
        if other is not value:
            yield Wrong(f"type {type(other).__name__}", other, "types")
    for number in _NUMBERS.get(type(value), ()):
        yield Wrong(f"{number}", number, "shapes")
    if isinstance(value, Tensor):
        yield from _wrong_tensors(value)
    elif isinstance(value, (list, tuple)) and value:
        yield Wrong("one element less", value[:-1], "shapes")
        for inner in wrong_values(value[-1]):
            if type(value) in (list, tuple):
                changed = type(value)([*value[:-1], inner.value])
                yield Wrong(f"last element: {inner.words}", changed, _inside(inner))
    elif isinstance(value, Mapping) and value:
        *before, last = value
        rest = {key: value[key] for key in before}
        yield Wrong("one key less", rest, "contents")
        for inner in wrong_values(value[last]):
            mapping = rest | {last: inner.value}
            yield Wrong(f"last value: {inner.words}", mapping, _inside(inner))


def _inside(wrong: Wrong) -> str:
    return "contents" if wrong.kind == "shapes" else wrong.kind


def _wrong_tensors(value: Tensor) -> Iterator[Wrong]:
    """Yield tensors of another shape, dtype or device than a valid one, and other contents."""
    if value.is_floating_point():
        yield Wrong("dtype int32", value.to(torch.int32), "shapes")
    else:
        yield Wrong("dtype int16", value.to(torch.int16), "forms")
    yield Wrong("one more axis", value[None], "shapes")
    yield Wrong("device meta", value.to("meta"), "shapes")
    if not value.numel() or value.is_meta:
        return
    if value.ndim:
        yield Wrong("one row less", value[:-1], "shapes")
    numbers: tuple[float, ...] = ()
    if value.dtype in (torch.int32, torch.int64):
        numbers = 100, -7
    elif value.is_floating_point() and value.ndim < 2:
        numbers = (math.nan,)
    for number in numbers:
        changed = value.clone()
        changed[(-1,) * value.ndim] = number
        yield Wrong(f"{number} at its end", changed, "contents")
