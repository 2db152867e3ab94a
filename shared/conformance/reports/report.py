"""Report: the result of each law on an implementation, as JSON, Markdown and JUnit XML."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ..base.results import (
    AGAIN,
    SEVERITIES,
    Result,
    Status,
    Symptom,
    size_of_input,
    symptoms_of,
)


@dataclass(frozen=True)
class Report:
    """The results of all laws.

    Args:
        implementation: The dotted name of the implementation.
        device: The device of its tensors.
        results: One result per law.
        settings: Seed and number of examples.
        outside: Results of the laws on cases outside of the declared support, if these were
            tried.
        is_outside_promised: Whether the implementation promises to reject such cases. Then a
            wrong result there is a failure.
    """

    implementation: str
    device: str
    results: tuple[Result, ...]
    settings: Mapping[str, int] = field(default_factory=dict)
    outside: tuple[Result, ...] = ()
    is_outside_promised: bool = False

    @property
    def ok(self) -> bool:
        """Whether no law failed that is not known to fail. A law may be unfinished."""
        return bool(self.results) and all(result.ok for result in self.judged)

    @property
    def unfinished(self) -> list[Result]:
        """The laws whose time was over before all of their cases were tried."""
        return [result for result in self.results if result.status == Status.UNFINISHED]

    @property
    def notes(self) -> list[str]:
        """What was noticed and is not a failure, with the law."""
        noted = (result for result in self.results if "note" in result.details)
        return [f"{result.law}: {result.details['note']}" for result in noted]

    @property
    def judged(self) -> tuple[Result, ...]:
        """The results that count: those inside of the support, and what else is promised."""
        return self.results + (self.outside if self.is_outside_promised else ())

    def counts(self) -> Counter[str]:
        """Return the number of laws per outcome."""
        return Counter(str(result.status) for result in self.results)

    def symptoms(self) -> list[Symptom]:
        """Return the failures, laws that fail alike together: the most severe symptom first.

        Of equally severe ones, those with a known cause come first.
        """
        return symptoms_of(self.judged)

    def laws_to_look_at_first(self) -> list[Result]:
        """Return at most three failures: one per symptom, then those with the smallest inputs."""
        symptoms = self.symptoms()
        firsts = [symptom.first for symptom in symptoms]
        others = [other for symptom in symptoms for other in symptom.results[1:]]
        return [*firsts, *sorted(others, key=size_of_input)][:3]

    def reproducer(self, result: Result) -> str:
        """Return a program that runs a broken law on its smallest failing input."""
        interpreted = (
            'import os\n\nos.environ.setdefault("TRITON_INTERPRET", "1")\n'
            if self.device == "cpu"
            else ""
        )
        is_outside = any(result is other for other in self.outside)
        outside = "    outside=True,\n" if is_outside else ""
        return (
            f"{interpreted}from pagetwin.conformance import reproduce\n\n"
            f"reproduce(\n    {self.implementation!r},\n    {result.law!r},\n"
            f"    {result.case!r},\n    device={self.device!r},\n{outside})\n"
        )

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        found = {
            "implementation": self.implementation,
            "device": self.device,
            "settings": dict(self.settings),
            "ok": self.ok,
            "is_finished": not self.unfinished,
            "counts": dict(self.counts()),
            "results": [
                asdict(result) | {"status": str(result.status)}
                for result in self.results
            ],
            "outside": [
                asdict(result) | {"status": str(result.status)}
                for result in self.outside
            ],
            "symptoms": [
                [result.law for result in symptom.results]
                for symptom in self.symptoms()
            ],
            "severities": [SEVERITIES[symptom.severity] for symptom in self.symptoms()],
            "laws_to_look_at_first": [
                result.law for result in self.laws_to_look_at_first()
            ],
        }
        return json.dumps(found, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return a table of the laws, and a section for each symptom."""
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
            f"| {result.law} | {result.area.replace('_', ' ')} | {result.status} | {result.count}"
            f" | {result.seconds:.1f} |"
            for result in self.results
        ]
        for symptom in self.symptoms():
            first = symptom.first
            lines += ["", f"## {symptom.title}", ""]
            lines += [f"Severity: {SEVERITIES[symptom.severity]}.", ""]
            lines.append(self.describe(first))
            lines += ["", "Laws:", ""]
            lines += [f"- {result.law}" for result in symptom.results]
        lines += self._undeclared()
        if first_laws := self.laws_to_look_at_first():
            lines += ["", f"## {heading_of(first_laws)}", ""]
            lines += [f"1. {result.law}: {result.summary}" for result in first_laws]
        return "\n".join(lines) + "\n"

    def to_junit(self) -> str:
        """Return the report as JUnit XML: one test case per law, and a failure per symptom."""
        suite = ElementTree.Element("testsuite", name=self.implementation)
        failed = errors = skipped = 0
        for result in self.results:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{self.implementation}.{result.area}",
                name=result.law,
                time=f"{result.seconds:.2f}",
            )
            text = _without_control(self.describe(result))
            if result.status in (Status.BROKEN, Status.UNEXPECTED):
                failed += 1
                _child(case, "failure", result, text)
            elif not result.ok:
                errors += 1
                _child(case, "error", result, text)
            elif result.status != Status.HELD:
                skipped += 1
                _child(case, "skipped", result, "")
        seconds = sum(result.seconds for result in self.results)
        counts = {"failures": failed, "errors": errors, "skipped": skipped}
        suite.attrib |= {name: str(count) for name, count in counts.items()}
        suite.attrib |= {"tests": str(len(self.results)), "time": f"{seconds:.2f}"}
        found = ElementTree.tostring(suite, encoding="unicode")
        return f'<?xml version="1.0" encoding="utf-8"?>\n{found}\n'

    def why_undeclared(self) -> dict[str, int]:
        """Return each reason why laws are undeclared, with the number of laws."""
        undeclared = [
            result for result in self.results if result.status == Status.OUTSIDE
        ]
        reasons = Counter(
            "operations that are not declared"
            if result.reason.startswith("needs ")
            else result.reason
            for result in undeclared
        )
        return dict(reasons.most_common())

    def outcomes_outside(self) -> list[tuple[str, str]]:
        """Return the outcome and the sentence of each law that was tried outside of the support.

        Laws without a case outside are left out.
        """
        return [
            (
                OUTCOMES.get(result.status, str(result.status)),
                f"{result.law}: {result.summary}",
            )
            for result in self.outside
            if result.cases > result.skipped or not result.ok
        ]

    def _undeclared(self) -> list[str]:
        """Return the sections about laws without a verdict, and about cases outside of SUPPORT."""
        lines: list[str] = []
        if reasons := self.why_undeclared():
            lines += ["", "## Why laws are undeclared", ""]
            lines += [f"- {count}: {reason}" for reason, count in reasons.items()]
        if self.unfinished:
            lines += ["", "## Laws that are not finished", ""]
            lines += [f"- {result.law}: {result.reason}" for result in self.unfinished]
        if self.notes:
            lines += ["", "## Notes", "", *(f"- {note}" for note in self.notes)]
        if self.outside:
            lines += ["", "## Outside of the declared support", ""]
            lines += [f"- {how}: {what}" for how, what in self.outcomes_outside()]
        return lines

    def describe(self, result: Result) -> str:
        """Return the details of a law that does not hold, as Markdown."""
        parts = [result.reason] if result.reason else []
        if result.case:
            which = "input" if result.status == Status.CRASHED else "smallest input"
            parts.append(f"{which}: `{result.case}`")
        if result.cause:
            parts.append(f"cause: {result.cause}")
        if result.what:
            parts.append(f"worst element: {result.what}, {result.where}")
            parts.append(f"found {result.found}, right is {result.right}")
        if result.message:
            parts.append(f"error: {result.message}")
        if again := result.details.get(AGAIN):
            parts.append(f"note: {again}")
        if picture := result.details.get("picture"):
            parts.append(f"{picture['where']} {picture['finding']}".strip())
        if result.case:
            parts.append(f"```python\n{self.reproducer(result).rstrip()}\n```")
        return "\n\n".join(parts)


def _child(case: ElementTree.Element, tag: str, result: Result, text: str) -> None:
    """Add the outcome of a law to its test case."""
    message = _without_control(result.summary or str(result.status))
    child = ElementTree.SubElement(case, tag, type=str(result.status), message=message)
    child.text = text


def _without_control(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]", "?", text)


OUTCOMES = {Status.HELD: "right", Status.BROKEN: "wrong"}
"""Outcomes of laws on cases outside of the declared support; others keep their name."""


def heading_of(results: Sequence[Result]) -> str:
    """Return the heading of the list of laws to look at first."""
    words = {1: "The law", 2: "The two laws", 3: "The three laws"}
    return f"{words[len(results)]} to look at first"
