"""How did an implementation do?"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum


class Status(str, Enum):
    """What became of a law."""

    HELD = "held"
    BROKEN = "broken"
    CRASHED = "crashed"
    MISSING = "missing"
    OUTSIDE = "undeclared"
    KNOWN = "known failure"
    UNEXPECTED = "known failure that holds"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Result:
    """What became of one law.

    Args:
        law: its sentence.
        area: what it is about.
        status: how it ended.
        cases: how many were tried before one failed.
        seconds: how long that took.
        refused: cases that say nothing: outside of what the implementation declares, and refused
            by it, or with nothing in them to ask of it.
        case: the smallest input on which the law is broken, or the one that crashed, as Python;
            empty if there is none.
        what, where, found, right: what was compared, the worst place, both answers there.
        message: the error, where an answer was none.
        reason: which operations are missing, what was refused, or why a failure is known.
    """

    law: str
    area: str
    status: Status
    cases: int = 0
    seconds: float = 0.0
    refused: int = 0
    case: str = ""
    what: str = ""
    where: str = ""
    found: str = ""
    right: str = ""
    message: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, or nothing but what is known."""
        return self.status in (Status.HELD, Status.OUTSIDE, Status.KNOWN)

    @property
    def count(self) -> str:
        """How many cases were tried, and how many of them refused."""
        return (
            f"{self.cases}, {self.refused} refused" if self.refused else f"{self.cases}"
        )


@dataclass(frozen=True)
class Report:
    """What became of every law.

    Args:
        implementation: the dotted name of what was tried.
        device: where its tensors lay.
        results: one a law.
        settings: seed and examples.
    """

    implementation: str
    device: str
    results: tuple[Result, ...]
    settings: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every law holds, is refused as a whole, or is a known failure that fails."""
        return bool(self.results) and all(each.ok for each in self.results)

    def counts(self) -> Counter[str]:
        """Return how many laws ended how."""
        return Counter(str(each.status) for each in self.results)

    def reproducer(self, result: Result) -> str:
        """Return a program that runs a broken law on its smallest input again."""
        interpreted = (
            'import os\n\nos.environ.setdefault("TRITON_INTERPRET", "1")\n'
            if self.device == "cpu"
            else ""
        )
        return (
            f"{interpreted}from pagetwin.conformance import reproduce\n\n"
            f"reproduce(\n    {self.implementation!r},\n    {result.law!r},\n"
            f"    {result.case!r},\n    device={self.device!r},\n)\n"
        )

    def to_json(self) -> str:
        """Return everything as JSON."""
        found = {
            "implementation": self.implementation,
            "device": self.device,
            "settings": dict(self.settings),
            "ok": self.ok,
            "counts": dict(self.counts()),
            "results": [
                asdict(each) | {"status": str(each.status)} for each in self.results
            ],
        }
        return json.dumps(found, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return a table of the laws, and a section for each that is broken."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        lines = [
            f"# {self.implementation} on {self.device}",
            "",
            f"{counts}.",
            "",
            "| law | about | ended | cases | seconds |",
            "|---|---|---|---:|---:|",
        ]
        lines += [
            f"| {each.law} | {each.area.replace('_', ' ')} | {each.status} | {each.count}"
            f" | {each.seconds:.1f} |"
            for each in self.results
        ]
        for each in self.results:
            if not each.ok:
                lines += ["", f"## {each.law}: {each.status}", "", self.describe(each)]
        return "\n".join(lines) + "\n"

    def describe(self, result: Result) -> str:
        """Return, as Markdown, what is to be known about a law that does not hold."""
        parts = [result.reason] if result.reason else []
        if result.case:
            which = "input" if result.status == Status.CRASHED else "smallest input"
            parts.append(f"{which}: `{result.case}`")
        if result.what:
            parts.append(f"worst place: {result.what}, {result.where}")
            parts.append(f"found {result.found}, right is {result.right}")
        if result.message:
            parts.append(f"error: {result.message}")
        if result.case:
            parts.append(f"```python\n{self.reproducer(result).rstrip()}\n```")
        return "\n\n".join(parts)
