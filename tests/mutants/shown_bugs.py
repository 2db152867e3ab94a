"""Bugs that the site shows: a page each, with the smallest input on which its mutant breaks a law.

    PYTHONPATH=tests python -m mutants.shown_bugs          # find the inputs, and record them
    PYTHONPATH=tests python -m mutants.shown_bugs window   # of pages with such words in their names

A page is a file of `docs/bugs/`. Its first lines name the kind of the bug, a mutant of the
catalogue, the law that finds it, and the public threads. The input and what the suite prints of it
are in `docs/data/museum/`, as finding and shrinking it takes longer than building the site.
"""

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from unittest.mock import patch

import torch
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.reports.terminal import print_report
from pagetwin.conformance.running import trial
from pagetwin.conformance.running.trial import find_law, make_setting, try_case

from .graft import grafted
from .mutant import BUGS, ROOT, Mutant, load_catalogue, tomllib

PAGES = ROOT / "docs" / "bugs"
DATA = ROOT / "docs" / "data" / "museum"

KINDS = {
    "off by one": "An edge or a start is wrong: by one, or by a length that is added or forgotten.",
    "wrong unit": "A number is right, in another unit: another base, scale, block or tile size.",
    "stale state": "A value of an earlier step is read again.",
    "identity": "Two things are taken for one, or one for two.",
    "precision": "A number does not fit its type, or infinity and NaN are not thought of.",
    "ordering": "Two operations change places.",
}
"""Kinds of bugs in the order of the index, and what they have in common."""

PARTS = ("The report", "Find the error", "Answer", "The smallest input")
"""Headings of a page, in order."""

EXAMPLES = 25
"""Drawn cases of a law."""

THREAD = re.compile(r"([\w.-]+/([\w.-]+))#(\d+)")


@dataclass(frozen=True)
class ShownBug:
    """One page about a bug.

    Args:
        slug: Name of the page.
        fields: The first lines of the page: "kind", the changed "file", "mutant", "law",
            "threads", and optionally "block_map", the moment that the block map shows.
        title: Its heading.
        parts: The text below each heading of PARTS.
    """

    slug: str
    fields: dict[str, str]
    title: str
    parts: dict[str, str]

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return self.fields["kind"]

    @property
    def law(self) -> Law:
        """The law that finds it."""
        return find_law(self.fields["law"])

    @cached_property
    def mutant(self) -> Mutant:
        """The change that brings it back."""
        folder = self.fields["file"].removesuffix(".py")
        return catalogue()[f"{folder}/{self.fields['mutant']}"]

    @property
    def threads(self) -> list[tuple[str, str]]:
        """Short name and address of each public thread."""
        return [
            (f"{name}#{number}", f"https://github.com/{repository}/issues/{number}")
            for repository, name, number in THREAD.findall(self.fields["threads"])
        ]

    @property
    def record(self) -> Path:
        """The file with its counterexample."""
        return DATA / f"{self.slug}.json"

    def recorded(self) -> dict[str, str]:
        """Return the recorded counterexample: `law`, `case`, and the lines that are printed."""
        found: dict[str, str] = json.loads(self.record.read_text(encoding="utf-8"))
        return found


@cache
def catalogue() -> dict[str, Mutant]:
    """Return the mutants of the catalogue by id."""
    return {mutant.id: mutant for mutant in load_catalogue()}


def known_threads() -> str:
    """Return the threads of all bugs of the catalogue, as one text."""
    bugs: dict[str, str] = tomllib.loads(BUGS.read_text(encoding="utf-8"))
    return "\n".join(bugs.values())


def load_page(path: Path) -> ShownBug:
    """Return the bug of a page.

    Raises:
        ValueError: A part of the page is missing, or there is another one.
    """
    text = path.read_text(encoding="utf-8")
    found = re.fullmatch(r"---\n(.*?)\n---\n+# ([^\n]+)\n+(## .*)", text, re.S)
    if found is None:
        raise ValueError(f"{path}: expected fields between --- and ---, and a heading")
    fields = dict(line.split(": ", 1) for line in found[1].splitlines())
    pieces = re.split(r"^## (.+)\n", found[3], flags=re.M)[1:]
    parts = dict(zip(pieces[::2], map(str.strip, pieces[1::2]), strict=True))
    if tuple(parts) != PARTS:
        raise ValueError(f"{path}: has {', '.join(parts)}: expected {', '.join(PARTS)}")
    return ShownBug(path.stem, fields, found[2], parts)


def load_pages() -> list[ShownBug]:
    """Return the bugs of all pages, by kind."""
    paths = [path for path in sorted(PAGES.glob("*.md")) if path.name != "index.md"]
    return sorted(map(load_page, paths), key=lambda bug: [*KINDS].index(bug.kind))


SECONDS_TO_SHRINK = 600.0
"""Time limit of the search for a smaller input, so that a slow machine finds the same one."""


def try_mutant(bug: ShownBug, case: str = "") -> Result:
    """Return how the law of a bug ends on its mutant.

    Args:
        bug: The bug.
        case: Optional. The only case that is tried, as it is. If empty, cases are drawn, and the
            smallest one that fails is searched.
    """
    with grafted(bug.mutant.package, bug.mutant) as twin:
        setting = make_setting(load_candidate(twin.__name__), "cpu")
        if case:
            return try_case(bug.law, setting, case, is_exact=True)
        with patch.object(trial, "SECONDS_TO_SHRINK", SECONDS_TO_SHRINK):
            return trial.try_law(bug.law, setting, 0, EXAMPLES)


def try_right(bug: ShownBug, case: str) -> Result:
    """Return how the law of a bug ends on the unchanged code."""
    setting = make_setting(load_candidate(bug.mutant.package), "cpu")
    return try_case(bug.law, setting, case, is_exact=True)


def printed(result: Result) -> str:
    """Return what `pagetwin check` prints of a broken law, up to its input."""
    if result.status != Status.BROKEN:
        raise ValueError(
            f"law {result.law!r} is {result.status}: expected a broken law"
        )
    with redirect_stdout(io.StringIO()) as stream:
        print_report(Report("my_kernels", "cpu", (result,)))
    lines = stream.getvalue().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("1 law "))
    end = next(n for n, line in enumerate(lines) if line.startswith("  input "))
    return "\n".join(lines[start : end + 1])


def counterexample(bug: ShownBug) -> dict[str, str]:
    """Return the smallest input on which a bug's mutant breaks its law, and what is printed."""
    found = try_mutant(bug)
    return {"law": found.law, "case": found.case, "printed": printed(found)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the counterexamples that the command line names."""
    parser = argparse.ArgumentParser(description="Record counterexamples of the site")
    parser.add_argument("words", nargs="*", help="words of the pages' names")
    words = parser.parse_args(arguments).words
    torch.set_num_threads(1)
    for bug in load_pages():
        if words and not any(word in bug.slug for word in words):
            continue
        found = counterexample(bug)
        text = json.dumps(found, indent=1)
        bug.record.write_text(f"{text}\n", encoding="utf-8")
        print(f"{bug.slug}: {found['printed']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
