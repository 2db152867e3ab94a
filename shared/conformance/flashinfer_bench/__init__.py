"""FlashInfer-Bench: its definitions, workloads, solutions and traces, in JSON.

A solution in that format is judged by the laws (`pagetwin check --solution FILE`), and the
definitions are exported with the reference and with workloads that contain needles, poison and
ragged lengths (`pagetwin export FOLDER`).
"""

import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ..candidates.file_formats import FileFormat
from .solutions import read_solution


def _load(file: str) -> ModuleType:
    # imports torch, which reading a file does not need
    from .adapter import load_solution

    return load_solution(file)


def _line_of(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # the sources of a solution are in no file
    own = [
        frame
        for frame in frames
        if frame.filename.endswith(".py") and not Path(frame.filename).exists()
    ]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _measure(*arguments: Any) -> dict[str, Any]:
    from .measuring import measure

    return measure(*arguments)


def _time_calls(*arguments: Any) -> dict[str, Any]:
    from .measuring import time_calls

    return time_calls(*arguments)


FORMAT = FileFormat(read_solution, _load, _line_of, _measure, _time_calls)
"""The format of FlashInfer-Bench: a JSON file with the sources of a solution."""
