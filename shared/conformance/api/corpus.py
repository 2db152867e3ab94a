"""Corpus: the folder in which fuzzing keeps what it has tried, and what failed.

`tried.jsonl` has one line per finished job: some batches of a signature, or a law on one seed.
Lines are only appended. So a run that is ended at any moment loses nothing but the job that was
running, and the next run continues with what has no line. `corpus.json` has one failure per
new symptom, each with a program that reproduces it. It stays there while it fails. `summary.json`
and `summary.md` count everything that was tried.
"""

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..base.results import AGAIN, SEVERITIES, Result, Status, severity_of
from ..reports.report import Report

CORPUS = Path(".pagetwin") / "fuzz"
"""Default folder of the corpora."""
TRIED = "tried.jsonl"
FAILURES = "corpus.json"
SUMMARY = "summary"


@dataclass(frozen=True)
class Line:
    """One finished job.

    Args:
        law: Its law.
        signature: Optional. Seed of the signature. If None, the law drew its cases from `first`.
        first: Index of the first batch, or the seed of the law.
        cases, skipped, seconds, status: As in `Result`.
        device: The device of the tensors.
        details: As in `Result`, without pictures.
        version: Version of the drawing of batches; 1 if the line has none.
    """

    law: str
    signature: int | None
    first: int
    cases: int
    skipped: int = 0
    seconds: float = 0.0
    status: str = str(Status.HELD)
    device: str = "cpu"
    details: dict[str, Any] = field(default_factory=dict)
    version: int = 1


class Corpus:
    """The corpus of one implementation.

    Args:
        folder: The folder of all corpora.
        implementation: The implementation, after which the own folder is named.

    Raises:
        ValueError: A file of the corpus cannot be read, or holds batches that another version
            drew.
        PermissionError, NotADirectoryError: The folder cannot be written.
    """

    def __init__(self, folder: Path, implementation: str) -> None:
        self.folder = folder / re.sub(r"\W+", "_", implementation).strip("_")
        _check_writable(self.folder)
        self.lines: list[Line] = list(self._read_lines())
        self.failures: list[Result] = self._read_failures()
        self._complete()

    def tried_batches(self) -> dict[tuple[str, int], int]:
        """Return how many batches of each law and signature were tried."""
        found: dict[tuple[str, int], int] = {}
        for line in self.lines:
            if line.signature is not None:
                key = line.law, line.signature
                found[key] = max(found.get(key, 0), line.first + line.cases)
        return found

    def broken_signatures(self) -> set[tuple[str, int]]:
        """Return the laws and signatures of which a batch failed."""
        ok = [str(Status.HELD), str(Status.OUTSIDE), str(Status.UNFINISHED)]
        return {
            (line.law, line.signature)
            for line in self.lines
            if line.signature is not None and line.status not in ok
        }

    def next_seeds(self) -> dict[str, int]:
        """Return the first seed that was not tried, of each law that draws its cases."""
        found: dict[str, int] = {}
        for line in self.lines:
            if line.signature is None:
                found[line.law] = max(found.get(line.law, 0), line.first + 1)
        return found

    def append(self, line: Line) -> None:
        """Store a finished job at once."""
        self.lines.append(line)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / TRIED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")

    def write(self, report: Report, failures: Sequence[Result]) -> list[Path]:
        """Write failures, a program for each, and the summary. Programs of others are removed.

        Args:
            report: Makes the programs.
            failures: One result per new symptom, the most severe first, and those that stay.

        Returns:
            The programs.
        """
        if not (self.lines or failures or self.folder.exists()):
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        before = set(_programs(self.folder, self.failures))
        self.failures = list(failures)
        words = [
            asdict(failure) | {"status": str(failure.status)} for failure in failures
        ]
        _replace(self.folder / FAILURES, {"failures": words})
        programs = []
        for path, failure in _programs(self.folder, failures).items():
            path.write_text(_words(report, failure), encoding="utf-8")
            programs.append(path)
        for path in before - set(programs):
            path.unlink(missing_ok=True)
        summary = self.summary()
        _replace(self.folder / f"{SUMMARY}.json", summary)
        text = summary_markdown(report.implementation, summary)
        (self.folder / f"{SUMMARY}.md").write_text(text, encoding="utf-8")
        return programs

    def summary(self) -> dict[str, Any]:
        """Return counts of all that was tried in all runs."""
        batches = [line for line in self.lines if line.signature is not None]
        others = [line for line in self.lines if line.signature is None]
        values: dict[str, Counter[str]] = {}
        counts: Counter[str] = Counter()
        stages: dict[str, float] = {}
        for line in batches:
            for name, value in line.details.get("signature", {}).items():
                values.setdefault(name, Counter())[value] += line.cases
            counts.update(line.details.get("counts", {}))
            for name, spent in line.details.get("seconds", {}).items():
                stages[name] = stages.get(name, 0.0) + spent
        seconds = sum(line.seconds for line in batches)
        cases = sum(line.cases for line in batches)
        return {
            "cases": cases + sum(line.cases for line in others),
            "cases of signatures": cases,
            "cases of laws": sum(line.cases for line in others),
            "skipped": sum(line.skipped for line in self.lines),
            "signatures": len({(line.law, line.signature) for line in batches}),
            "laws": len({line.law for line in self.lines}),
            "failures": len(self.failures),
            "devices": sorted({line.device for line in self.lines}),
            "seconds of signatures": round(seconds, 1),
            "cases per second and worker": round(cases / seconds, 1) if seconds else 0,
            "stages": {name: round(spent, 1) for name, spent in stages.items()},
            "counts": dict(counts),
            "values": {name: dict(its.most_common()) for name, its in values.items()},
        }

    def _complete(self) -> None:
        """End a line that a process had begun to write when it was ended."""
        file = self.folder / TRIED
        if file.exists() and not file.read_bytes().endswith(b"\n"):
            with file.open("a", encoding="utf-8") as unfinished:
                unfinished.write("\n")

    def _read_lines(self) -> Iterator[Line]:
        file = self.folder / TRIED
        if not file.exists():
            return
        # imported here, because it imports torch: a new corpus is judged without it
        from ..cases.signatures import VERSION

        for text in file.read_text(encoding="utf-8").split("\n"):
            if not text:
                continue
            try:
                line = Line(**json.loads(text))
            except json.JSONDecodeError:
                continue  # a process was ended while it wrote; the job is tried again
            except TypeError:
                raise _unreadable(file) from None
            if line.signature is not None and line.version != VERSION:
                raise ValueError(
                    f"corpus = {file}: its batches were drawn by version {line.version} of the"
                    f" drawing, expected {VERSION}; remove it to start anew, or name another folder"
                )
            yield line

    def _read_failures(self) -> list[Result]:
        file = self.folder / FAILURES
        if not file.exists():
            return []
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["failures"]
            return [
                Result(**stored | {"status": Status(stored["status"])})
                for stored in found
            ]
        except (ValueError, KeyError, TypeError):
            raise _unreadable(file) from None


def check_numbers(minutes: float, **numbers: int | None) -> None:
    """Raise if a limit of a run is out of range.

    Args:
        minutes: Duration.
        numbers: Numbers of at least 1, by name. If None, a number is not limited.
    """
    if not minutes > 0:
        raise ValueError(f"minutes = {minutes:g}: expected more than 0")
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} = {number}: expected at least 1")


def summary_markdown(implementation: str, summary: dict[str, Any]) -> str:
    """Return the summary of a corpus as Markdown."""
    stages = ", ".join(f"{name} {spent} s" for name, spent in summary["stages"].items())
    lines = [
        f"# Corpus of {implementation}",
        "",
        f"{summary['cases']:,} cases, {summary['skipped']:,} of them skipped:"
        f" {summary['cases of signatures']:,} batches of {summary['signatures']:,}"
        f" signatures, and {summary['cases of laws']:,} cases that laws drew. Failures:"
        f" {summary['failures']}.",
        "",
        f"Devices: {', '.join(summary['devices'])}. Batches took"
        f" {summary['seconds of signatures']:,} s,"
        f" {summary['cases per second and worker']} per second and worker"
        f"{f' ({stages})' if stages else ''}.",
        "",
        "| content of the batches | count |",
        "|---|---:|",
    ]
    counts = sorted(summary["counts"].items())
    lines += [f"| {name} | {count:,} |" for name, count in counts]
    lines += ["", "| option | value: batches |", "|---|---|"]
    for name, values in summary["values"].items():
        words = ", ".join(f"{value}: {count:,}" for value, count in values.items())
        lines.append(f"| {name} | {words} |")
    return "\n".join(lines) + "\n"


def _check_writable(folder: Path) -> None:
    """Raise if no file can be written in a folder, before anything is computed."""
    existing = folder
    # unlike `exists`, it does not raise for a name that is too long
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(f"corpus = {folder}: {existing} is not a folder")
    longest = max(len(os.fsencode(part)) for part in folder.parts)
    if longest > (most := os.pathconf(existing, "PC_NAME_MAX")):
        raise ValueError(
            f"corpus = {folder}: a name of {longest} bytes, expected at most {most}"
        )
    try:
        # the only reliable test, also on a read-only or full file system
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise PermissionError(
            f"corpus = {folder}: no file can be created in {existing}"
            f" ({error.strerror}): expected a folder that you may write"
        ) from None


def _unreadable(file: Path) -> ValueError:
    return ValueError(
        f"corpus = {file}: expected a file that `pagetwin fuzz` wrote; remove it to start anew"
    )


def _replace(path: Path, words: dict[str, Any]) -> None:
    """Write a JSON file, completely or not at all."""
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    unfinished.write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _programs(folder: Path, failures: Sequence[Result]) -> dict[Path, Result]:
    """Return the file of the program that reproduces each failure that has a case."""
    found: dict[Path, Result] = {}
    for failure in failures:
        if not failure.case:
            continue
        words = f"{failure.law}  {SEVERITIES[severity_of(failure)]}".lower()
        name = re.sub(r"[^a-z0-9 ]+", "", words).replace(" ", "_")
        path, number = folder / f"{name}.py", 1
        while path in found:
            number += 1
            path = folder / f"{name}_{number}.py"
        found[path] = failure
    return found


def _words(report: Report, result: Result) -> str:
    """Return a program that reproduces a broken law. Its docstring shows the failure."""
    told = [f"{result.law}: {result.status}"]
    if result.what:
        told.append(
            f"{result.what}, {result.where}: {result.found}, right is {result.right}"
        )
    if result.message:
        told.append(result.message)
    if again := result.details.get(AGAIN):
        told.append(again)
    words = "\n\n".join(told).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{words}\n"""\n\n{report.reproducer(result)}'
