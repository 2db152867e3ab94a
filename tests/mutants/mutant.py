"""Which bugs are planted, and where?

The catalogue is a folder of TOML files. An entry names the bug of the field that it brings back
(bugs.toml says where that one happened), says by which kind of change, and gives the text that is
replaced, which stands once in its file.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .digest import change_digest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CATALOGUE = Path(__file__).parent / "catalogue"
BUGS = Path(__file__).parent / "bugs.toml"
TWINS = ("reference", "optimized")
PACKAGES = {"reference": "reference/", "optimized": "optimized/"}
"""The packages whose files are changed, and their folders."""

OPERATORS = {
    "index type": "an index is kept in fewer bits",
    "sentinel": "a sentinel is used as an index or a number, or not used at all",
    "edge": "floor for ceiling, < for <=, one too many or too few",
    "wrong field": "another field of the same kind: the maximum for the row's, all for new",
    "wrong row": "another request, head, rank or group",
    "rebase": "a running sum where one request's own is meant, or the other way round",
    "stride": "an order of axes, or a stride taken from a shape",
    "granularity": "block, page, tile or chunk in each other's place",
    "mask": "something is not hidden on one path",
    "order": "two operations change places",
    "dropped argument": "one path does not pass on what it was given",
    "constant": "a number where something has to be computed",
    "unit": "another base, the inverse of a scale, a scale too many",
    "empty case": "nothing is not thought of",
    "buffer": "a fresh tensor for a lasting one, or a stale part of a lasting one",
    "class": "a request is told apart by the wrong sign",
    "aliasing": "two share what each should own",
    "other requests": "what a request gets depends on its neighbours",
}
"""What a change does, by the name of the operator."""


@dataclass(frozen=True)
class Mutant:
    """One small change of one file.

    Args:
        id: where and what goes wrong: "reference/block_table/blocks-rounded-down".
        bug: what it brings back: the number of a bug in bugs.toml, or "cousin of" one.
        thread: where that bug happened.
        operator: one of OPERATORS.
        file: which file of which package, such as "reference/cache/block_table.py".
        old, new: the text that stands once in that file, and what takes its place.
        equivalent: why no output can show the change; empty if one has to.
        ask_first: words of the law that is asked before all others by a run from scratch, where
            the order of nearness would take long; empty: none.
    """

    id: str
    bug: str
    thread: str
    operator: str
    file: str
    old: str
    new: str
    equivalent: str
    ask_first: str = ""

    @property
    def package(self) -> str:
        """The package that is changed: "reference" or "optimized"."""
        return _package(self.file)

    @property
    def twin(self) -> str:
        """The twin that is tried: the reference where one body serves both, as it is faster."""
        return self.package

    @property
    def module(self) -> str:
        """Which of its modules is changed, such as "cache.slot_mapping"."""
        path = self.file.removeprefix(PACKAGES[self.package])
        return ".".join(Path(path.removesuffix("__init__.py")).with_suffix("").parts)

    @property
    def origin(self) -> str:
        """The thread of its bug, or that it is a cousin of that one."""
        return f"{self.bug.rpartition(' ')[0]} {self.thread}".strip()

    @cached_property
    def digest(self) -> str:
        """A few characters that change with the function that is changed, or with the change."""
        return change_digest(ROOT / self.file, self.source())

    def source(self) -> str:
        """Return the changed file.

        Raises:
            ValueError: the old text is not in it once, or the new file is not Python.
        """
        return changed_source(self.id, self.file, self.old, self.new)


def changed_source(id: str, file: str, old: str, new: str) -> str:
    """Return a file in which a text is replaced, of the mutant with that id.

    Raises:
        ValueError: the old text does not stand once in it, or is the new one.
        SyntaxError: the new file is not Python.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    count = text.count(old)
    if count != 1 or new == old:
        raise ValueError(
            f"mutant {id!r}: its old text stands {count} times in {file}:"
            " expected once, and another text for it"
        )
    changed = text.replace(old, new)
    ast.parse(changed)
    return changed


def _package(file: str) -> str:
    """Return the package of a file; its first folder if it is in none."""
    found = [name for name, folder in PACKAGES.items() if file.startswith(folder)]
    return found[0] if found else file.partition("/")[0]


def load_catalogue(folder: Path = CATALOGUE) -> list[Mutant]:
    """Return all mutants, concept by concept.

    Raises:
        ValueError: an entry names an unknown operator, bug or package, or bears the name of
            another one.
        KeyError: it lacks something.
    """
    threads = tomllib.loads(BUGS.read_text(encoding="utf-8"))
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for mutant in _of_file(path, threads):
            if mutant.id in found:
                raise ValueError(f"mutant {mutant.id!r}: expected one of that name")
            found[mutant.id] = mutant
    return list(found.values())


def _of_file(path: Path, threads: dict[str, str]) -> Iterator[Mutant]:
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))[
        "mutant"
    ]
    for entry in entries:
        # both twins may have the same text
        files = entry["file"] if isinstance(entry["file"], list) else [entry["file"]]
        bug = entry["bug"].removeprefix("cousin of ")
        for file in files:
            for name, value, known in (
                ("file", _package(file), PACKAGES),
                ("operator", entry["operator"], OPERATORS),
                ("bug", bug, threads),
            ):
                if value not in known:
                    raise ValueError(
                        f"{path.name}: {entry['id']}: {name} = {value!r}: expected one of"
                        f" {', '.join(known)}"
                    )
            yield Mutant(
                id=f"{file.removesuffix('.py')}/{entry['id']}",
                bug=entry["bug"],
                thread=threads[bug],
                operator=entry["operator"],
                file=file,
                old=entry["old"].strip("\n"),
                new=entry["new"].strip("\n"),
                equivalent=" ".join(entry.get("equivalent", "").split()),
                ask_first=entry.get("ask_first", ""),
            )
