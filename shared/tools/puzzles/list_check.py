"""Check of a puzzle whose tensors are nested lists: plain Python, for a browser without torch.

The right answers, and those of the usual mistakes, come with each case (list_form.py). So only the
answer that is checked is computed here. This file imports nothing of pagetwin.
"""

import copy
import json
import math
import traceback
from typing import Any

Answer = dict[str, Any]
"""Results by name; or `error`, the type of the error; or `extra`, what was returned instead."""
FILE = "answer.py"
SOLVED, NOT_STARTED, WRONG = "solved", "not started", "wrong"
LINE_WIDTH = 68
MOST_LEVELS = 8
"""Levels of lists that are shown: a list may contain itself."""
TOLERANCE = 1e-5
"""Absolute and relative, as for tensors (answers.py)."""


def check_text(data: str, source: str) -> str:
    """Return the outcome of the check of an answer, as JSON.

    Args:
        data: The list form of a puzzle, as JSON.
        source: Text of a file that defines the function.

    Returns:
        An object with `status`, and if it is wrong with `hint`, the hint's name, and `parts`: pairs
        of a title (input, yours, right, where, error, hint) and lines.
    """
    return json.dumps(check(json.loads(data), source))


def check(puzzle: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the outcome of the check of an answer: see check_text."""
    names: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(source, FILE, "exec"), names)
    except BaseException as error:
        return _cannot_run(puzzle, _words_of(error, source))
    function = names.get(puzzle["name"])
    if not callable(function):
        return _cannot_run(puzzle, f"The text defines no function {puzzle['name']}.")
    return check_function(puzzle, function, source)


def check_function(
    puzzle: dict[str, Any], function: Any, source: str
) -> dict[str, Any]:
    """Return the outcome of the check of a function, whose text is `source`: see check_text."""
    tried: list[tuple[dict[str, Any], Answer]] = []
    failing: dict[str, Any] | None = None
    for case in puzzle["cases"]:
        found = answer_of(puzzle, function, case["arguments"])
        if found.get("error") == "NotImplementedError":
            return {"status": NOT_STARTED}
        tried.append((case, found))
        if failing is None and difference_of(puzzle, found, case["right"]):
            failing = case
    if failing is None:
        return {"status": SOLVED}
    found = next(found for case, found in tried if case is failing)
    difference = difference_of(puzzle, found, failing["right"])
    assert difference is not None
    kind, text = difference
    if kind == "error":
        text = _words_of(found["raised"], source)
    hint, words = _choose_hint(puzzle, tried, failing, found, kind)
    parts = [
        ("input", _show_all(failing["arguments"])),
        ("yours", _show_all(found.get("results", {}))),
        ("right", _show_all(failing["right"]["results"])),
        ("error" if kind == "error" else "where", text.split("\n")),
        ("hint", [words]),
    ]
    return {
        "status": WRONG,
        "hint": hint,
        "parts": [(title, lines) for title, lines in parts if lines],
    }


def _cannot_run(puzzle: dict[str, Any], text: str) -> dict[str, Any]:
    hint = f"The text has to define {puzzle['name']} with the arguments of the puzzle."
    parts = [("error", text.split("\n")), ("hint", [hint])]
    return {"status": WRONG, "hint": "error", "parts": parts}


def answer_of(puzzle: dict[str, Any], function: Any, arguments: dict[str, Any]) -> Any:
    """Return the answer of a function on a case, whose arguments are not modified."""
    given = copy.deepcopy(arguments)
    passed = {
        name: iter(value) if name == puzzle["iterator"] else value
        for name, value in given.items()
    }
    try:
        found = function(**passed)
    except BaseException as error:  # an answer may call sys.exit
        return {"error": type(error).__name__, "raised": error}
    changed = [
        name
        for name, value in arguments.items()
        if name not in puzzle["modified"] and not is_equal(given[name], value)
    ]
    returned = found if isinstance(found, tuple) else () if found is None else (found,)
    results = {name: given[name] for name in puzzle["modified"]}
    if len(returned) != len(puzzle["results"]):
        return {"extra": _described(found), "changed": changed}
    results |= dict(zip(puzzle["results"], returned, strict=True))
    return {"results": results, "changed": changed}


def difference_of(
    puzzle: dict[str, Any], found: Answer, right: Answer
) -> tuple[str, str] | None:
    """Return kind and words of the first difference from the right answer, or None."""
    if "error" in found:
        return "error", found["error"]
    if "extra" in found:
        names = ", ".join(puzzle["results"]) or "nothing"
        return "count", f"it returned {found['extra']}, expected {names}"
    for name, wanted in right["results"].items():
        axes = {**puzzle["modified"], **puzzle["results"]}[name]
        if not isinstance(found["results"][name], (list, tuple)):
            described = _described(found["results"][name])
            return "type", f"{name} is {described}, expected a list"
        difference = _first(name, axes, (), found["results"][name], wanted)
        if difference:
            return difference
    if found["changed"]:
        names = ", ".join(found["changed"])
        return "changed", f"the call changed {names}, which is only read"
    return None


def _first(
    name: str, axes: list[str], index: tuple[int, ...], found: Any, right: Any
) -> tuple[str, str] | None:
    """Return kind and words of the first element that differs, or None."""
    where = ", ".join(
        f"{axis} {entry}" for axis, entry in zip(axes, index, strict=False)
    )
    if not isinstance(right, list):
        if isinstance(found, (list, tuple)):
            return "shape", f"{name} at {where} is a list, expected a number"
        if is_equal(found, right):
            return None
        words = f"yours {_number(found)}, right {_number(right)}"
        return "value", f"{name} at {where}: {words}"
    if not isinstance(found, (list, tuple)) or len(found) != len(right):
        count = len(found) if isinstance(found, (list, tuple)) else "no list"
        of = f"{name} at {where}" if where else name
        axis = axes[len(index)] if len(index) < len(axes) else "element"
        return "shape", f"{of} has {count}, expected {len(right)} [{axis}]"
    for entry, (one, other) in enumerate(zip(found, right, strict=True)):
        difference = _first(name, axes, (*index, entry), one, other)
        if difference:
            return difference
    return None


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two nested lists have the same numbers. Floats may differ by the tolerance."""
    if isinstance(one, (list, tuple)) or isinstance(other, (list, tuple)):
        return (
            isinstance(one, (list, tuple))
            and isinstance(other, (list, tuple))
            and len(one) == len(other)
            and all(map(is_equal, one, other))
        )
    if not all(isinstance(value, (int, float)) for value in (one, other)):
        return type(one) is type(other) and bool(one == other)
    if isinstance(other, float):
        try:
            one = float(one)
        except OverflowError:  # an integer of more than 308 digits
            return False
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == other)


def is_same(found: Answer, other: Answer) -> bool:
    """Return whether two answers have the same results, or raised the same type of error."""
    if "error" in found or "error" in other:
        return found.get("error") == other.get("error")
    if "extra" in found or "extra" in other:
        return found.get("extra") == other.get("extra")
    return found["results"].keys() == other["results"].keys() and all(
        is_equal(value, other["results"][name])
        for name, value in found["results"].items()
    )


def _choose_hint(
    puzzle: dict[str, Any],
    tried: list[tuple[dict[str, Any], Answer]],
    failing: dict[str, Any],
    found: Answer,
    kind: str,
) -> tuple[str, str]:
    """Return name and text of the hint that explains most answers, the shown one included."""
    general: dict[str, str] = puzzle["general_hints"]
    if kind in ("count", "type", "changed"):
        return kind, general[kind]
    best, chosen = 0, -1
    for number in range(len(puzzle["hints"])):
        if not is_same(found, _mistake(failing, number)):
            continue
        score = sum(is_same(answer, _mistake(case, number)) for case, answer in tried)
        if score > best:
            best, chosen = score, number
    if chosen >= 0:
        name, text = puzzle["hints"][chosen]
        return name, text
    if kind in general:
        return kind, general[kind]
    return "idea", puzzle["idea"]


def _mistake(case: dict[str, Any], number: int) -> Answer:
    """Return the answer of a usual mistake to a case. None in a case is the right answer."""
    answer: Answer = case["mistakes"][number] or case["right"]
    return answer


def _words_of(error: BaseException, source: str) -> str:
    """Return the type of an error, what it says, and the line of the answer that raised it."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        lines = [error.lineno] if error.filename == FILE else []
    else:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == FILE]
    if not lines or lines[-1] is None:
        return words
    text = source.splitlines()[lines[-1] - 1].strip()
    return f"{words}\nin line {lines[-1]}: {text}"


def _described(found: Any) -> str:
    if found is None:
        return "None"
    if isinstance(found, tuple):
        return f"{len(found)} results"
    return f"one {type(found).__name__}"


def _show_all(values: dict[str, Any]) -> list[str]:
    return [line for name, value in values.items() for line in _show(name, value)]


def _show(name: str, value: Any) -> list[str]:
    """Return a value in one line, or in one line per row if it is longer."""
    line = f"{name} = {_nested(value)}"
    if len(line) <= LINE_WIDTH or not isinstance(value, list):
        return [line]
    if not any(isinstance(part, (list, tuple)) for part in value):
        return [line]
    return [
        text for row, part in enumerate(value) for text in _show(f"{name}[{row}]", part)
    ]


def _nested(value: Any, level: int = 0) -> str:
    if isinstance(value, (list, tuple)):
        if level == MOST_LEVELS:
            return "..."
        return f"[{', '.join(_nested(part, level + 1) for part in value)}]"
    return _number(value)


def _number(value: Any) -> str:
    """Return a number with at most four significant digits; 0 or 1 for a bool."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(int(value)) if isinstance(value, (bool, int)) else repr(value)
