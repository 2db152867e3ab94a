"""Mutants of the instruments: of the conformance suite without its laws, and of the recorder.

The catalogue is a folder of TOML files. An entry has an id that says what breaks, and the text that
is replaced, which stands once in its file. The `tests` of a file have to find its mutants.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from .digest import MUTANTS, ROOT, change_digest
from .mutant import changed_source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CATALOGUE = MUTANTS / "instruments"
PACKAGES = (
    "shared/conformance/api",
    "shared/conformance/base",
    "shared/conformance/candidates",
    "shared/conformance/checks",
    "shared/conformance/flashinfer_bench",
    "shared/conformance/reports",
    "shared/conformance/running",
    "shared/recorder",
)
"""The folders of the instruments."""


@dataclass(frozen=True)
class InstrumentMutant:
    """One small change of an instrument.

    Args:
        id: Where and what goes wrong: "checks/expect/dtype-not-compared".
        file: The changed file, such as "shared/conformance/checks/expect.py".
        old, new: The text that stands once in that file, and what replaces it.
        tests: Files of the tests that have to find it.
    """

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """The name of the changed module."""
        return module_of(self.file)

    @property
    def equivalent(self) -> str:
        """Empty: some test has to find each of them."""
        return ""

    @cached_property
    def digest(self) -> str:
        """A few characters that change with the function that is changed, or with the change."""
        return change_digest(ROOT / self.file, self.source())

    @cached_property
    def functions(self) -> frozenset[str]:
        """The functions and methods with a changed line; empty if none has one."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        same = _common(self.old, self.new)
        before = text[: text.index(self.old) + same]
        old, new = self.old[same:], self.new[same:]
        rest = old[: len(old) - _common(old[::-1], new[::-1])]
        first = before.count("\n") + 1
        last = first + rest.rstrip("\n").count("\n")
        return frozenset(
            name
            for name, begin, end in _functions_now(self.file)
            if begin <= last and end >= first
        )

    def source(self) -> str:
        """Return the changed file.

        Raises:
            ValueError: The old text does not stand once in it.
            SyntaxError: The new file is not Python.
        """
        return changed_source(self.id, self.file, self.old, self.new)


def module_of(file: str) -> str:
    """Return the name of the module of a file in `shared/`."""
    parts = Path(file).with_suffix("").parts
    return ".".join(["pagetwin", *parts[1:]]).removesuffix(".__init__")


@cache
def _functions_now(file: str) -> tuple[tuple[str, int, int], ...]:
    """Return the functions and methods of a file, with their first and last lines."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return tuple(
        (name, node.lineno, node.end_lineno or node.lineno)
        for name, node in _nodes_of(text)
    )


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    differ = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differ, min(len(one), len(other)))


def _nodes_of(text: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef):
                    yield f"{node.name}.{statement.name}", statement


def load_instruments(folder: Path = CATALOGUE) -> list[InstrumentMutant]:
    """Return all mutants of instruments, file by file.

    Raises:
        ValueError: Two have the same id.
        KeyError: An entry lacks something.
    """
    found: dict[str, InstrumentMutant] = {}
    for path in sorted(folder.glob("*.toml")):
        words = tomllib.loads(path.read_text(encoding="utf-8"))
        for entry in words.get("mutant", ()):
            file = entry.get("file") or words["file"]
            place = file.removeprefix("shared/").removeprefix("conformance/")
            mutant = InstrumentMutant(
                id=f"{place.removesuffix('.py')}/{entry['id']}",
                file=file,
                old=entry["old"].strip("\n"),
                new=entry["new"].strip("\n"),
                tests=tuple(entry.get("tests") or words["tests"]),
            )
            if mutant.id in found:
                raise ValueError(f"mutant {mutant.id!r}: expected one of that name")
            found[mutant.id] = mutant
    return list(found.values())


def traced_modules() -> list[str]:
    """Return the names of all modules of the instruments."""
    return [
        module_of(path.relative_to(ROOT).as_posix())
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    ]


VERDICTS = ("Corruption", "Disagreement", "expect_same", "found_interference")
"""Functions whose call is a verdict or makes one."""


def deciding_functions(text: str) -> set[str]:
    """Return the functions and methods of a file that decide a verdict.

    They raise an error, return a violation, compare results exactly, or choose a `Status`.
    """
    found = set()
    for name, node in _nodes_of(text):
        for part in ast.walk(node):
            is_call = isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
            is_verdict = is_call and part.func.id in VERDICTS  # type: ignore[attr-defined]
            is_status = isinstance(part, ast.Attribute) and (
                isinstance(part.value, ast.Name) and part.value.id == "Status"
            )
            is_error = isinstance(part, ast.Raise) and part.exc is not None
            if is_verdict or is_status or is_error:
                found.add(name)
    return found
