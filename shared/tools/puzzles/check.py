"""Check of one puzzle in this process: small cases first, then the laws.

Every case is tried, the smallest first, and then all with tensors that are not contiguous. The
first one with a wrong result is shown. The hint is that of the usual mistake which has the same
result there, and in most of the other cases.
"""

import importlib.util
import linecache
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ...engine.triton_versions import repair_loaded_interpreter
from .answers import (
    CallResult,
    Difference,
    answer_of,
    first_difference,
    is_same,
    origin_of,
    sentence_of,
)
from .puzzle import Case, Function, Puzzle, case_with_strides
from .show import show_answer, show_case

SOLVED = "solved"
NOT_STARTED = "not started"
WRONG = "wrong"
EXAMPLES = 12
"""Drawn cases per law."""
SECONDS_OF_CASES = 2.5
"""Time limit of the cases once one is wrong: the others only serve the choice of the hint."""
GENERAL_HINTS = {
    "error": "The call raised an error. Follow the line above with the input that is shown.",
    "strides": "With contiguous tensors the answer is right. Here the elements of a tensor are not"
    " next to each other in memory, as in a part of a larger tensor. view cannot join such axes."
    " reshape joins them in a copy, so what is written to it is lost. Index each axis instead.",
    "count": "Return what the docstring lists, in that order. A function without `return` returns"
    " None.",
    "type": "Return tensors, as the docstring lists them.",
    "shape": "Compare the shape with the one in the docstring, axis by axis.",
    "dtype": "The numbers may be right, in another dtype. The docstring names the dtype.",
    "changed": "The caller still needs its arguments: write to a copy, as x.clone(). x[0] is not a"
    " copy but a view of x, so y = x[0]; y += 1 changes x too.",
}

Tried = tuple[Case, CallResult, CallResult]
"""A case, the answer of the function, and the right one."""


@dataclass(frozen=True)
class Outcome:
    """The result of the check of one puzzle, as text.

    Args:
        status: SOLVED, NOT_STARTED or WRONG.
        hint: Optional. Identifier of the hint. Empty if the puzzle is not wrong.
        hint_text: The hint.
        difference: What differs, and where.
        case: The smallest failing input, one argument or row per line.
        found, right: Both answers on that input, one result or row per line.
        law: Optional. The sentence of the broken law. Empty if a small case failed.
    """

    status: str
    hint: str = ""
    hint_text: str = ""
    difference: str = ""
    case: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    law: str = ""


def check_file(puzzle: Puzzle, file: Path) -> Outcome:
    """Return the result of the check of one file."""
    file = file.absolute()  # as in the frames of an error
    text = file.read_text(encoding="utf-8")
    if text == puzzle.template:
        return Outcome(NOT_STARTED)
    try:
        module = load(file)
        function = getattr(module, puzzle.name, None)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome(
            WRONG,
            "file",
            "Python cannot import the file. Correct the line that is named.",
            f"{sentence_of(error)}{_line_in(file, error)}",
        )
    if not callable(function):
        return Outcome(
            WRONG,
            "name",
            f"Call your function {puzzle.name}, as in the file that pagetwin wrote.",
            f"{file.name} has no function {puzzle.name}",
        )
    return check_function(puzzle, function, file)


def load(file: Path) -> ModuleType:
    """Return the module of a file, executed anew. No bytecode is written."""
    name = f"pagetwin_puzzle_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _without_bytecode():
        spec.loader.exec_module(module)
    repair_loaded_interpreter()
    return module


def check_function(
    puzzle: Puzzle, function: Function, file: Path | None = None
) -> Outcome:
    """Return the result of the check of a function.

    Args:
        puzzle: The puzzle.
        function: The function that solves it, or not.
        file: Optional. Its file, whose lines are named in errors. If None, no line is named.
    """
    cases = list(puzzle.cases())
    wrong = _check_cases(puzzle, function, file, cases)
    if wrong is None and puzzle.has_strides:
        # after the others, which are right: so the strides alone are the reason of what is wrong
        parts = [case_with_strides(case) for case in cases]
        wrong = _check_cases(puzzle, function, file, parts, "strides")
    return wrong or _check_laws(puzzle, function, file)


def _check_cases(
    puzzle: Puzzle,
    function: Function,
    file: Path | None,
    cases: list[Case],
    hint: str = "",
) -> Outcome | None:
    """Return the result of the check on some cases, or None if all answers are right.

    Args:
        hint: Optional. The general hint, if only one can explain a wrong answer.
    """
    tried: list[Tried] = []
    failing: Tried | None = None
    began = time.perf_counter()
    for case in cases:
        found = answer_of(puzzle, function, case)
        if _is_not_started(found):
            return Outcome(NOT_STARTED)
        right = answer_of(puzzle, puzzle.right, case)
        assert right.error is None, right.error
        tried.append((case, found, right))
        if failing is None and first_difference(puzzle, found, right) is not None:
            failing = tried[-1]
        if failing and time.perf_counter() - began > SECONDS_OF_CASES:
            break
    if failing is None:
        return None
    case, found, right = failing
    difference = first_difference(puzzle, found, right)
    assert difference is not None
    name, text = (
        (hint, GENERAL_HINTS[hint])
        if hint
        else _choose_hint(puzzle, tried, failing, difference)
    )
    return Outcome(
        WRONG,
        name,
        text,
        f"{difference.text}{_line_in(file, found.error, function)}",
        tuple(show_case(case)),
        tuple(show_answer(found, right.results)),
        tuple(show_answer(right, right.results)),
    )


def _choose_hint(
    puzzle: Puzzle, tried: list[Tried], failing: Tried, first: Difference
) -> tuple[str, str]:
    """Return name and text of the hint that explains most answers, the shown one included."""
    if first.kind in ("count", "type", "dtype", "changed"):
        return first.kind, GENERAL_HINTS[first.kind]
    best, chosen = 0, None
    for hint in puzzle.hints:
        case, found, _ = failing
        if not is_same(found, answer_of(puzzle, hint.wrong, case)):
            continue
        score = sum(
            is_same(found, answer_of(puzzle, hint.wrong, case))
            for case, found, _ in tried
        )
        if score > best:
            best, chosen = score, hint
    if chosen is not None:
        return chosen.name, chosen.text
    if first.kind in GENERAL_HINTS:
        return first.kind, GENERAL_HINTS[first.kind]
    return "idea", puzzle.idea


def _check_laws(puzzle: Puzzle, function: Function, file: Path | None) -> Outcome:
    """Return the result of the laws of the puzzle's operations."""
    if puzzle.operations is None:
        return Outcome(SOLVED)
    from ...conformance.base.results import Status
    from ...conformance.candidates.candidate import Candidate, Support
    from ...conformance.candidates.fatal import message_of
    from ...conformance.running.trial import find_law, make_setting, try_law

    raised: dict[str, Exception] = {}

    def watched(*values: Any, **named: Any) -> Any:
        try:
            return function(*values, **named)
        except Exception as error:
            raised[message_of(error)] = error
            raise

    candidate = Candidate(puzzle.name, puzzle.operations(watched), Support())
    setting = make_setting(candidate, "cpu")
    for sentence in puzzle.laws:
        result = try_law(find_law(sentence), setting, 0, EXAMPLES)
        if result.status == Status.HELD:
            continue
        wrong = Outcome(WRONG, case=(result.case,), law=sentence)
        if result.message in raised:
            error = raised[result.message]
            return replace(
                wrong,
                hint="error",
                hint_text=GENERAL_HINTS["error"],
                difference=f"{sentence_of(error)}{_line_in(file, error, function)}",
            )
        return replace(
            wrong,
            hint="law",
            hint_text=puzzle.law_hint,
            difference=result.message or f"{result.what} {result.where}",
            found=(result.found,) if result.what else (),
            right=(result.right,) if result.what else (),
        )
    return Outcome(SOLVED)


def _is_not_started(answer: CallResult) -> bool:
    """Return whether the call reached a bare `raise NotImplementedError`, as in the template."""
    error: BaseException | None = answer.error
    while error is not None:
        if type(error) is NotImplementedError and not str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line_in(
    file: Path | None, error: BaseException | None, function: Function | None = None
) -> str:
    """Return the line of a file at which an error was raised, in words.

    Args:
        file: Optional. The file. If None, no line is named.
        error: Optional. The error.
        function: Optional. The function that was called, whose first line is named if the call
            itself is what is wrong.
    """
    if file is None or error is None:
        return ""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(origin_of(error).__traceback__)
        if frame.filename == str(file)
    ]
    code = getattr(function, "__code__", None)
    if not lines and code is not None and code.co_filename == str(file):
        lines = [code.co_firstlineno]
    if not lines or lines[-1] is None:
        return ""
    text = linecache.getline(str(file), lines[-1]).strip()
    return f"\nin line {lines[-1]} of {file.name}: {text}"


@contextmanager
def _without_bytecode() -> Iterator[None]:
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
