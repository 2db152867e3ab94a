"""Report: the result of each law on an implementation, as JSON and Markdown."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum


class Status(str, Enum):
    """The outcome of a law."""

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
    """The result of one law.

    Args:
        law: Its sentence.
        area: Its subject.
        status: Its outcome.
        cases: Number of cases that were tried until one failed.
        seconds: Duration in seconds.
        skipped: Number of cases that tested nothing: the implementation raised because the case is
            outside of its declared support, or the law called no operation.
        case: The smallest input that breaks the law, or the one that crashed, as Python. Empty if
            no case failed.
        what, where, found, right: What was compared, the index of the largest error, and the found
            and the expected value there.
        message: The error, if the implementation raised one.
        reason: The missing operations, the reasons why cases are outside of the support, or the
            reason of a known failure.
    """

    law: str
    area: str
    status: Status
    cases: int = 0
    seconds: float = 0.0
    skipped: int = 0
    case: str = ""
    what: str = ""
    where: str = ""
    found: str = ""
    right: str = ""
    message: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the law holds, is outside of the support, or is a known failure."""
        return self.status in (Status.HELD, Status.OUTSIDE, Status.KNOWN)

    @property
    def count(self) -> str:
        """The number of cases that were tried, and how many of them tested nothing."""
        return (
            f"{self.cases}, {self.skipped} skipped" if self.skipped else f"{self.cases}"
        )


@dataclass(frozen=True)
class Report:
    """The results of all laws.

    Args:
        implementation: The dotted name of the implementation.
        device: The device of its tensors.
        results: One result per law.
        settings: Seed and number of examples.
    """

    implementation: str
    device: str
    results: tuple[Result, ...]
    settings: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every law holds, is outside of the support, or is a known failure."""
        return bool(self.results) and all(each.ok for each in self.results)

    def counts(self) -> Counter[str]:
        """Return the number of laws per outcome."""
        return Counter(str(each.status) for each in self.results)

    def reproducer(self, result: Result) -> str:
        """Return a program that runs a broken law on its smallest failing input."""
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
        """Return the whole report as JSON."""
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
        """Return a table of the laws, and a section for each law that does not hold."""
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
        """Return the details of a law that does not hold, as Markdown."""
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
