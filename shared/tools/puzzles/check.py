"""Check of one puzzle in this process: small cases first, then the laws.

Every case is tried, the smallest first. The first one with a wrong result is shown. The hint is
that of the usual mistake which has the same result there, and in most of the other cases.
"""

import importlib.util
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ...engine.triton_versions import repair_loaded_interpreter
from .answers import CallResult, Difference, answer_of, first_difference, is_same
from .puzzle import Case, Function, Puzzle
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
    "count": "Return what the docstring lists, in that order. A function without `return` returns"
    " None.",
    "type": "Return tensors, as the docstring lists them.",
    "shape": "Compare the shape with the one in the docstring, axis by axis.",
    "dtype": "The numbers may be right, in another dtype. The docstring names the dtype.",
    "changed": "The caller still needs its arguments. Write to a new tensor.",
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
            f"{type(error).__name__}: {error}{_line_in(file, error)}",
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
    tried: list[Tried] = []
    failing: Tried | None = None
    began = time.perf_counter()
    for case in puzzle.cases():
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
        return _check_laws(puzzle, function)
    case, found, right = failing
    difference = first_difference(puzzle, found, right)
    assert difference is not None
    hint, text = _choose_hint(puzzle, tried, failing, difference)
    line = "" if file is None else _line_in(file, found.error)
    return Outcome(
        WRONG,
        hint,
        text,
        f"{difference.text}{line}",
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


def _check_laws(puzzle: Puzzle, function: Function) -> Outcome:
    """Return the result of the laws of the puzzle's operations."""
    if puzzle.operations is None:
        return Outcome(SOLVED)
    from ...conformance.harness.candidate import Candidate, Support
    from ...conformance.harness.report import Status
    from ...conformance.harness.trial import find_law, make_setting, try_law

    candidate = Candidate(puzzle.name, puzzle.operations(function), Support())
    setting = make_setting(candidate, "cpu")
    for sentence in puzzle.laws:
        result = try_law(find_law(sentence), setting, 0, EXAMPLES)
        if result.status != Status.HELD:
            words = f"{result.what} {result.where}" if result.what else result.message
            return Outcome(
                WRONG,
                "law",
                puzzle.law_hint,
                words,
                (result.case,),
                (result.found,) if result.what else (),
                (result.right,) if result.what else (),
                sentence,
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


def _line_in(file: Path, error: BaseException | None) -> str:
    """Return the line of a file at which an error was raised, in words."""
    if error is None:
        return ""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == file
    ]
    if not frames:
        return ""
    return f"\n  in line {frames[-1].lineno} of {file.name}: {frames[-1].line}"


@contextmanager
def _without_bytecode() -> Iterator[None]:
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
