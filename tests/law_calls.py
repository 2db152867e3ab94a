"""Functions of pagetwin that a law calls, found with a profiler of Python calls."""

import ast
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from mutants.reach import Place
from pagetwin.conformance.harness.candidate import load_candidate
from pagetwin.conformance.harness.law import Law
from pagetwin.conformance.harness.trial import make_setting, try_law
from source_tree import modules


def called_by(law: Law, twin: str, examples: int) -> set[Place]:
    """Return the definitions at the top of modules whose code runs when a law is tried.

    Args:
        law: The law. Of a list of cases, as many as of drawn ones are tried.
        twin: "reference" or "optimized".
        examples: Number of cases.
    """
    setting = make_setting(load_candidate(twin), "cpu")
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the interpreter, about overflows
            result = try_law(law, setting, 0, examples, listed=examples)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert result.status == "held", result
    return {place for code in codes for place in _place_of(code)}


def _place_of(code: CodeType) -> Iterator[Place]:
    """Yield the definition that holds some code; nothing if it is outside of pagetwin."""
    module = _modules_by_file().get(str(Path(code.co_filename).resolve()))
    if module is not None and code.co_name != "<module>":
        for first, last, name in _lines_of(module):
            if first <= code.co_firstlineno <= last:
                yield module, name


@cache
def _modules_by_file() -> dict[str, str]:
    return {str(path.resolve()): module for module, path in modules().items()}


@cache
def _lines_of(module: str) -> list[tuple[int, int, str]]:
    """Return the first and last line of each function and class, with its name."""
    return [
        (
            min([node.lineno, *(each.lineno for each in node.decorator_list)]),
            node.end_lineno or node.lineno,
            node.name,
        )
        for node in ast.parse(modules()[module].read_text(encoding="utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
