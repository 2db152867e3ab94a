"""Presentation of a case and of both answers: names, shapes and small numbers."""

from typing import Any

from torch import Tensor

from .answers import CallResult, number
from .puzzle import Case

LINE_WIDTH = 68
"""Characters of a line, of which a terminal of 80 columns shows 69."""


def show_case(case: Case) -> list[str]:
    """Return the arguments of a case, one or more lines per argument; then unusual strides."""
    lines = [line for name, value in case.items() for line in show(name, value)]
    strides = [
        f"{name}.stride() = {value.stride()}"
        for name, value in case.items()
        if isinstance(value, Tensor) and not value.is_contiguous()
    ]
    return lines + strides


def show_answer(answer: CallResult, names: dict[str, Any]) -> list[str]:
    """Return the results of an answer, or what it returned instead. None if it raised."""
    if answer.error is not None:
        return []
    if answer.extra:
        return [f"returned {answer.extra}"]
    return [line for name in names for line in show(name, answer.results[name])]


def show(name: str, value: Any) -> list[str]:
    """Return an argument or a result in one line, or in one line per row if it is longer."""
    if isinstance(value, list) and any(isinstance(element, tuple) for element in value):
        return [
            line
            for index, element in enumerate(value)
            for line in show(f"{name}[{index}]", element)
        ]
    if isinstance(value, tuple):
        return [f"{name} = ({', '.join(map(_nested, value))})"]
    if not isinstance(value, Tensor):
        return [f"{name} = {value}"]
    if value.dtype.itemsize == 1 and value.dtype.is_floating_point:
        value = value.float()
    one = _nested(value)
    line = f"{name} = {one}"
    if len(line) <= LINE_WIDTH or value.dim() < 2:
        return [line]
    rows = [f"{name}[{index}]" for index in range(len(value))]
    return [
        line for row, part in zip(rows, value, strict=True) for line in show(row, part)
    ]


def _nested(value: Tensor) -> str:
    if value.dim() == 0:
        return number(value)
    if value.dim() == 1 or value.numel():
        return f"[{', '.join(_nested(part) for part in value)}]"
    return f"empty, shape {list(value.shape)}"
