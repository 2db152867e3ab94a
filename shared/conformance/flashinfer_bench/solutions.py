"""Solutions: a JSON file with the sources of a kernel, checked before anything is imported.

Nothing here imports torch, so a file that cannot be judged is rejected in a fraction of a second.
"""

import ast
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..candidates.first_imports import first_imports, is_found
from .definitions import Definition, find_definition
from .families import FAMILIES

LANGUAGES = ("python", "triton")
WORDS: dict[type, str] = {str: "a text", dict: "an object", list: "a list"}


@dataclass(frozen=True)
class Solution:
    """A kernel for one definition.

    Args:
        file: The JSON file.
        name: The name of the solution.
        definition: The definition that it solves.
        language: One of LANGUAGES.
        entry_file: The source that contains the function.
        entry_name: The name of the function.
        fills_outputs: Whether the function fills outputs that it gets as its last arguments. If
            not, it returns them.
        dependencies: Packages that it needs.
        sources: The text of each source, by its relative path.
    """

    file: str
    name: str
    definition: Definition
    language: str
    entry_file: str
    entry_name: str
    fills_outputs: bool
    dependencies: tuple[str, ...]
    sources: dict[str, str]

    @property
    def package(self) -> str:
        """The name of the package that its sources are imported as. Its contents determine it."""
        text = json.dumps([self.name, self.sources], sort_keys=True)
        return f"pagetwin_solution_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of the function, in order."""
        outputs = self.definition.outputs if self.fills_outputs else ()
        return [*self.definition.inputs, *outputs]


def read_solution(file: str) -> Solution:
    """Return the solution of a JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not JSON, lacks a field, has a field of the wrong kind, belongs to
            an unknown definition, is in another language, or its function has the arguments of
            another definition.
        ImportError: A package that it needs is not installed.
    """
    found = _read_json(file)
    spec = _field(file, found, "spec", dict)
    sources = _sources(file, found)
    definition = find_definition(_field(file, found, "definition", str))
    entry = _field(file, spec, "entry_point", str, "spec.")
    entry_file, colons, entry_name = entry.partition("::")
    if not colons or entry_file not in sources or not entry_name.isidentifier():
        raise ValueError(
            f"{file}: spec.entry_point = {entry!r}: expected FILE::FUNCTION with one of"
            f" {', '.join(sources)}"
        )
    language = _field(file, spec, "language", str, "spec.")
    if language not in LANGUAGES or not entry_file.endswith(".py"):
        raise ValueError(
            f"{file}: spec.language = {language!r} with {entry_file}: expected python or triton,"
            " and a .py file; a Python source can build other languages with"
            " torch.utils.cpp_extension"
        )
    dependencies = spec.get("dependencies") or []
    if not isinstance(dependencies, list):
        raise ValueError(
            f"{file}: spec.dependencies = {dependencies!r}: expected a list"
        )
    solution = Solution(
        file,
        _field(file, found, "name", str),
        definition,
        language,
        entry_file,
        entry_name,
        bool(spec.get("destination_passing_style", True)),
        tuple(str(dependency) for dependency in dependencies),
        sources,
    )
    _check_arguments(solution)
    _check_installed(solution)
    return solution


def _read_json(file: str) -> dict[str, Any]:
    """Return the object that a file contains."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"solution = {file!r}: the file does not exist")
    try:
        found = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{file} contains {type(found).__name__}: expected an object with the fields of a"
            " solution"
        )
    return found


def _field(
    file: str, found: dict[str, Any], name: str, kind: type, before: str = ""
) -> Any:
    """Return a field that must be there."""
    value = found.get(name)
    if not isinstance(value, kind) or not value:
        words = WORDS[kind]
        told = f"= {value!r}" if name in found else "is missing"
        raise ValueError(f"{file}: {before}{name} {told}: expected {words}"[:300])
    return value


def _sources(file: str, found: dict[str, Any]) -> dict[str, str]:
    """Return the sources by their paths."""
    sources: dict[str, str] = {}
    for source in _field(file, found, "sources", list):
        if not isinstance(source, dict):
            raise ValueError(f"{file}: sources has {source!r}: expected objects"[:300])
        path = _field(file, source, "path", str, "sources.")
        parts = PurePosixPath(path).parts
        if path in sources or path.startswith("/") or ".." in parts:
            raise ValueError(
                f"{file}: sources.path = {path!r}: expected different relative paths without .."
            )
        sources[path] = _field(file, source, "content", str, f"sources {path} ")
    return sources


def _tree(solution: Solution, path: str) -> ast.Module:
    try:
        return ast.parse(solution.sources[path])
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"{solution.file}: {path} is not valid Python: {error}"
        ) from None


def _check_arguments(solution: Solution) -> None:
    """Raise if the function does not take the inputs of the definition.

    A function that is not defined at the top of its file, but imported or computed, is not checked.
    """
    entry = next(
        (
            statement
            for statement in _tree(solution, solution.entry_file).body
            if isinstance(statement, ast.FunctionDef)
            and statement.name == solution.entry_name
        ),
        None,
    )
    if entry is None:
        return
    taken = [argument.arg for argument in (*entry.args.posonlyargs, *entry.args.args)]
    needed = taken[: len(taken) - len(entry.args.defaults)]
    expected = solution.arguments
    takes_all = entry.args.vararg is not None or len(taken) >= len(expected)
    if takes_all and len(needed) <= len(expected):
        inputs = solution.definition.inputs
        # outputs may have any names, because arguments are passed by position
        if all(a == b for a, b in zip(taken, inputs, strict=False)):
            return
    raise ValueError(
        f"{solution.file}: {solution.entry_name} takes ({', '.join(taken)}): expected"
        f" ({', '.join(expected)}) of {solution.definition.name}{_of_other(taken, solution)}"
    )


def _of_other(taken: list[str], solution: Solution) -> str:
    """Return the words that name another definition whose inputs a function takes."""
    own = solution.definition
    for family in FAMILIES:
        # page size 1 has an input less
        for size in (1, 2):
            other = Definition(family, (size,) * len(family.constants))
            inputs = list(other.inputs)
            if family != own.family and taken[: len(inputs)] == inputs:
                return f"; these are the inputs of {family.pattern}"
    if solution.fills_outputs and taken == list(own.inputs):
        return "; a function that returns its outputs sets destination_passing_style to false"
    return ""


def _check_installed(solution: Solution) -> None:
    """Raise if a package is not installed that the solution names or imports first."""
    for dependency in solution.dependencies:
        name = re.split(r"[\s<>=!~\[;]", dependency, maxsplit=1)[0]
        # others, such as CUTLASS_3_7, are headers and toolchains
        if name.islower() and not is_found(name.replace("-", "_")):
            raise ImportError(
                f"{solution.file} needs {dependency}, which is not installed: pip install {name}"
            )
    for path in solution.sources:
        if not path.endswith(".py") or "sys.path" in solution.sources[path]:
            continue
        for name, _ in first_imports(_tree(solution, path)):
            if not is_found(name):
                raise ImportError(
                    f"{solution.file}: {path} imports {name}, which is not installed: pip"
                    f" install {name}"
                )
