"""List form of a puzzle: tensors are nested lists, so that it can be solved where torch is not.

The documentation's page runs it in the browser (list_check.py). Everything else is made of the
puzzle: its text, its cases, and the answers of the usual mistakes to each of them.
"""

import ast
import math
import re
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .answers import CallResult, answer_of
from .check import GENERAL_HINTS
from .puzzle import Function, Puzzle
from .tasks import PUZZLES

TERMINAL_ONLY = {
    "fp8_write": "FP8 numbers are a dtype of torch",
    "decode": "Triton runs on Linux",
}
"""The puzzles without a list form, and the reason."""
ITERATORS = {"online_softmax": "tiles"}
"""The argument that is passed as an iterator, by puzzle."""
ALL_HINTS = {
    **{name: GENERAL_HINTS[name] for name in ("error", "count")},
    "type": "Return lists, as the docstring lists them.",
    "shape": "Compare the lengths of the lists with the shape in the docstring, axis by axis.",
    "changed": "The caller still needs its arguments: write to a copy, as x[:]. The rows of a"
    " copied list are the same rows: copy each row that you write to.",
}
STRIDES = "    The tensors may have any strides: they need not be contiguous.\n\n"
IMPORTS = "import torch\nfrom torch import Tensor\n"


def list_forms() -> dict[str, Any]:
    """Return the list form of every puzzle that has one, and why the others have none."""
    return {
        "puzzles": [
            list_form(puzzle) for puzzle in PUZZLES if puzzle.name not in TERMINAL_ONLY
        ],
        "terminal_only": [
            {
                "number": puzzle.number,
                "title": puzzle.title,
                "reason": TERMINAL_ONLY[puzzle.name],
            }
            for puzzle in PUZZLES
            if puzzle.name in TERMINAL_ONLY
        ],
    }


def list_form(puzzle: Puzzle) -> dict[str, Any]:
    """Return everything that list_check.check needs of a puzzle, as JSON takes it."""
    cases = []
    for case in puzzle.cases():
        right = _plain_answer(answer_of(puzzle, puzzle.right, case))
        mistakes = [
            _plain_answer(answer_of(puzzle, hint.wrong, case)) for hint in puzzle.hints
        ]
        cases.append(
            {
                "arguments": {name: plain(value) for name, value in case.items()},
                "right": right,
                # most mistakes change few cases: None is the right answer
                "mistakes": [None if wrong == right else wrong for wrong in mistakes],
            }
        )
    return {
        "number": puzzle.number,
        "name": puzzle.name,
        "title": puzzle.title,
        "page": puzzle.page,
        "template": template_of(puzzle),
        "iterator": ITERATORS.get(puzzle.name, ""),
        "results": {name: list(axes) for name, axes in puzzle.results.items()},
        "modified": {name: list(axes) for name, axes in puzzle.modified.items()},
        "cases": cases,
        "hints": [(hint.name, hint.text) for hint in puzzle.hints],
        "general_hints": ALL_HINTS,
        "idea": puzzle.idea,
    }


def plain(value: Any) -> Any:
    """Return a value with nested lists instead of tensors."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    return value


def on_lists(puzzle: Puzzle, function: Function) -> Function:
    """Return a function on lists that calls a function on tensors.

    The dtypes of the arguments are those of the puzzle's first case.
    """
    first = next(iter(puzzle.cases()))

    def called(**arguments: Any) -> Any:
        given = {name: _like(first[name], value) for name, value in arguments.items()}
        found = puzzle.call(function, given) if puzzle.call else function(**given)
        for name, value in given.items():
            if isinstance(value, Tensor):
                arguments[name][:] = plain(value)
        return tuple(map(plain, found)) if isinstance(found, tuple) else plain(found)

    return called


def _like(example: Any, value: Any) -> Any:
    """Return a list as a tensor where the example is one, and so in lists and tuples."""
    if isinstance(example, Tensor):
        return torch.tensor(value, dtype=example.dtype)
    if isinstance(example, (list, tuple)) and any(
        isinstance(part, (Tensor, tuple)) for part in example
    ):
        kinds = example if isinstance(example, tuple) else repeat(example[0])
        return type(example)(map(_like, kinds, value))
    return value


def _plain_answer(answer: CallResult) -> dict[str, Any]:
    if answer.error is not None:
        return {"error": type(answer.error).__name__}
    if answer.extra:
        return {"extra": answer.extra}
    return {"results": {name: plain(value) for name, value in answer.results.items()}}


def template_of(puzzle: Puzzle) -> str:
    """Return the text of a puzzle with lists: signature, and an example in numbers."""
    text = puzzle.template
    has_floats = re.search(r"exp\(|average|logarithm", text) is not None
    text = text.replace(IMPORTS, "import math\n" if has_floats else "")
    iterator = "from collections.abc import Iterator\n"
    text = text.replace(f"{iterator}\nimport math\n", f"import math\n{iterator}")
    text = text.replace(STRIDES, "").replace("Tensor", "list")
    begin = text.index("        >>> ")
    end = text.index('    """\n    raise')
    text = f"{text[:begin]}{_example(puzzle)}{text[end:]}"
    return re.sub(r"\n\n\n\n+", "\n\n\n", text)


def _example(puzzle: Puzzle) -> str:
    """Return the call of a puzzle's example and its results, with lists."""
    shown = puzzle.template[puzzle.template.index("        >>> ") :].splitlines()
    source = "\n".join(
        line[12:] for line in shown if line.startswith(("        >>> ", "        ... "))
    )
    body = ast.parse(source).body
    names: dict[str, Any] = {"torch": torch, puzzle.name: puzzle.right}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == puzzle.name:
                return _shown_call(puzzle, node, names)
        exec(compile(ast.Module([statement], []), "example", "exec"), names)
    raise ValueError(f"the example of puzzle {puzzle.name} does not call it")


def _shown_call(puzzle: Puzzle, node: ast.Call, names: dict[str, Any]) -> str:
    values = [*node.args, *(word.value for word in node.keywords)]
    case: dict[str, Any] = {}
    for name, value in zip(next(iter(puzzle.cases())), values, strict=True):
        found = eval(ast.unparse(value), names)
        is_read_once = name == ITERATORS.get(puzzle.name)
        case[name] = list(found) if is_read_once else found
    answer = answer_of(puzzle, puzzle.right, case)
    lines = [f">>> {puzzle.name}("]
    for name, value in case.items():
        written = _rounded(plain(value))
        if name == ITERATORS.get(puzzle.name):
            written = f"iter({written})"
        lines.append(f"...     {name}={written},")
    lines.append("... )")
    lines += [
        f"{name} = {_rounded(plain(value))}" for name, value in answer.results.items()
    ]
    return "".join(f"        {line}\n" for line in lines)


def _rounded(value: Any) -> str:
    """Return the text of nested lists with at most four digits after the point."""
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    if isinstance(value, float) and math.isfinite(value):
        return repr(round(value, 4) + 0.0)
    return repr(value)
