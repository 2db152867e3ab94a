"""Lines of kernels: where a role is in the source, for the report of a fault."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import triton

FOREIGN = (
    "<",
    *(
        f"{Path(str(module.__file__)).parent}/"
        for module in (sys.modules[__name__], torch, triton)
    ),
)
"""Folders whose lines are not those of a kernel; nor are those of generated functions."""


class Place(NamedTuple):
    """A line of a kernel."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


UNKNOWN = Place("", 0)
PLACES: list[Place] = [UNKNOWN]
"""All lines that accesses to shared memory were made from: an access stores the index of its."""
NUMBERS: dict[Place, int] = {UNKNOWN: 0}


def current_place() -> Place:
    """Return the line of the innermost function of a kernel that this thread runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(FOREIGN):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN


def number_of(place: Place) -> int:
    """Return the index of a line in PLACES."""
    if place not in NUMBERS:
        NUMBERS[place] = len(PLACES)
        PLACES.append(place)
    return NUMBERS[place]


def place_of(error: BaseException) -> Place:
    """Return the line of a kernel that an error was raised from."""
    found, step = UNKNOWN, error.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(FOREIGN):
            found = Place(step.tb_frame.f_code.co_filename, step.tb_lineno)
        step = step.tb_next
    return found
