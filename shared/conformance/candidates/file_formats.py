"""Formats of files that hold an implementation and are not Python's: who reads and measures them.

A format is one entry in `FORMATS` and one module with a `FileFormat`.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple


class FileFormat(NamedTuple):
    """What the suite asks of a format.

    Args:
        check: raises if a file of the format is not valid. It imports nothing that the file names.
        load: returns the implementation in a file as a module with operations and SUPPORT.
        line_of: returns where in the implementation an error was raised, in parentheses: the
            name of a file, and a line. Nothing if it was not there.
        measure: returns errors of an operation on a workload, by name.
        time_calls: returns times of an operation on a workload, by name.
    """

    check: Callable[[str], Any]
    load: Callable[[str], ModuleType]
    line_of: Callable[[Exception], str]
    measure: Callable[..., dict[str, Any]]
    time_calls: Callable[..., dict[str, Any]]


PACKAGE = __name__.rpartition(".candidates.")[0]
FORMATS = {".json": f"{PACKAGE}.flashinfer_bench"}
"""The ending of file names -> the module whose FORMAT reads them, imported when it is needed."""


def find_format(name: str) -> FileFormat | None:
    """Return the format of a file, or None for a module or a file of Python."""
    for ending, module in FORMATS.items():
        if name.endswith(ending):
            found: FileFormat = import_module(module).FORMAT
            return found
    return None
