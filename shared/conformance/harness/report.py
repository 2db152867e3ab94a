"""Report: the result of each law on an implementation, as JSON, Markdown and JUnit XML.

Laws that fail alike are one symptom: an implementation with one bug breaks many laws, and one
program is enough to reproduce it. The symptoms are ordered by severity.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any


class Status(str, Enum):
    """The outcome of a law."""

    HELD = "held"
    BROKEN = "broken"
    CRASHED = "crashed"
    HANGS = "hangs"
    OUT_OF_MEMORY = "out of memory"
    MISSING = "missing"
    OUTSIDE = "undeclared"
    KNOWN = "known failure"
    UNEXPECTED = "known failure that holds"
    NOT_TRIED = "not tried"
    UNFINISHED = "not finished"

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
        reason: The missing operations, the reasons why cases are outside of the support, the reason
            of a known failure, or why the law was not tried.
        cause: Where NaN in the output comes from, if the search found it: the slot whose poison
            reached the output, for instance.
        details: What else is known, as numbers and words: "picture" is what `pictures.py` draws of
            a failure; "signature", "counts" and "seconds" describe the batches of a signature;
            "note" is a sentence about something that is not a failure; "again" says what a failing
            input did when it was tried again, if it was something else.
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
    cause: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed that is not known to fail.

        The law holds, is outside of the support, is a known failure, or is not finished.
        """
        return self.status in (
            Status.HELD,
            Status.OUTSIDE,
            Status.KNOWN,
            Status.UNFINISHED,
        )

    @property
    def count(self) -> str:
        """The number of cases that were tried, and how many of them tested nothing."""
        return (
            f"{self.cases}, {self.skipped} skipped" if self.skipped else f"{self.cases}"
        )

    @property
    def summary(self) -> str:
        """One sentence about the failure, and what its input did when it was tried again."""
        found = self.cause or self.message
        if not found and self.what:
            found = (
                f"{self.what}, {self.where}: found {self.found}, right is {self.right}"
            )
        again = self.details.get(AGAIN)
        return "; ".join(each for each in (found or self.reason, again) if each)

    @property
    def raises(self) -> bool:
        """Whether the implementation raised an error for an input within its support."""
        return not self.ok and SEVERITIES[severity_of(self)].startswith("error")

    @property
    def symptom(self) -> tuple[str, str]:
        """What laws that fail alike have in common: the outcome, and the failure in words."""
        return str(self.status), self._failure

    @property
    def _failure(self) -> str:
        """The failure without its numbers."""
        if self.status in (Status.MISSING, Status.UNEXPECTED, Status.NOT_TRIED):
            return self.reason
        if self.cause:
            return _kind_of_cause(self.cause)
        if self.message:
            return without_numbers(self.message)
        what = without_numbers(self.what)
        kind = _kind_of_value(self.found, self.right)
        if kind == "a number instead of a number":
            kind = "outside of its error budget" if "budget" in self.where else "wrong"
        return f"{what} is {kind}"


def unfinished(result: Result, during: str = "") -> Result:
    """Return the result of a law whose time was over before all of its cases were tried.

    Args:
        result: The cases that were tried until then, and the seconds.
        during: Optional. The case that was being tried, as Python. It is not among those that
            held. If empty, no case was being tried.
    """
    held = result.cases - result.skipped
    reason = f"{held} cases held in {result.seconds:g} seconds"
    if during:
        reason += ", and the next one had not ended"
    return replace(result, status=Status.UNFINISHED, case=during, reason=reason)


AGAIN = "again"
"""Name in `Result.details` of what happened when an input was tried again."""
SEVERITIES = (
    "ends the process",
    "writes outside of its output",
    "reads memory that it must not read",
    "wrong result",
    "result above its error budget",
    "error for declared input",
    "invalid input is accepted",
    "operation is missing",
    "known failure that holds",
    "not tried",
)
"""What a failure means for a user of the kernel, the most severe first."""
NOT_WRITTEN = "is not written everywhere"
WITHOUT_POISON = "is NaN even if the caches hold no NaN"
AROUND = "memory between or around the elements of the caches"
AROUND_QUERY = "memory between or around the elements of the query"
"""Causes of NaN that is not read from a slot."""
CLEARLY_WRONG = 100.0
"""Error budgets above which a result is wrong whatever the rounding."""


@dataclass(frozen=True)
class Symptom:
    """Laws that fail alike.

    Args:
        results: Their results. The first one has the smallest input.
    """

    results: tuple[Result, ...]

    @property
    def first(self) -> Result:
        """The result with the smallest input, which represents the others."""
        return self.results[0]

    @property
    def severity(self) -> int:
        """The smallest index in SEVERITIES of its results."""
        return min(severity_of(each) for each in self.results)

    @property
    def title(self) -> str:
        """How many laws fail, and what they have in common."""
        count = len(self.results)
        status, failure = self.first.symptom
        if {each.message for each in self.results} == {self.first.message}:
            failure = self.first.message or failure
        return f"{count} law{'s' * (count > 1)} {status}: {failure}"


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
        return bool(self.results) and all(each.ok for each in self.judged)

    @property
    def unfinished(self) -> list[Result]:
        """The laws whose time was over before all of their cases were tried."""
        return [each for each in self.results if each.status == Status.UNFINISHED]

    @property
    def notes(self) -> list[str]:
        """What was noticed and is not a failure, with the law."""
        noted = (each for each in self.results if "note" in each.details)
        return [f"{each.law}: {each.details['note']}" for each in noted]

    @property
    def judged(self) -> tuple[Result, ...]:
        """The results that count: those inside of the support, and what else is promised."""
        return self.results + (self.outside if self.is_outside_promised else ())

    def counts(self) -> Counter[str]:
        """Return the number of laws per outcome."""
        return Counter(str(each.status) for each in self.results)

    def symptoms(self) -> list[Symptom]:
        """Return the failures, laws that fail alike together: the most severe symptom first.

        Of equally severe ones, those with a known cause come first.
        """
        groups: dict[tuple[object, ...], list[Result]] = {}
        for each in self.judged:
            if not each.ok:
                key = (severity_of(each), *each.symptom)
                groups.setdefault(key, []).append(each)
        found = [
            Symptom(tuple(sorted(group, key=size_of_input)))
            for group in groups.values()
        ]
        return sorted(
            found,
            key=lambda each: (
                each.severity,
                not each.first.cause,
                -len(each.results),
                size_of_input(each.first),
            ),
        )

    def laws_to_look_at_first(self) -> list[Result]:
        """Return at most three failures: one per symptom, then those with the smallest inputs."""
        symptoms = self.symptoms()
        firsts = [each.first for each in symptoms]
        others = [other for each in symptoms for other in each.results[1:]]
        return [*firsts, *sorted(others, key=size_of_input)][:3]

    def reproducer(self, result: Result) -> str:
        """Return a program that runs a broken law on its smallest failing input."""
        interpreted = (
            'import os\n\nos.environ.setdefault("TRITON_INTERPRET", "1")\n'
            if self.device == "cpu"
            else ""
        )
        is_outside = any(result is each for each in self.outside)
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
                asdict(each) | {"status": str(each.status)} for each in self.results
            ],
            "outside": [
                asdict(each) | {"status": str(each.status)} for each in self.outside
            ],
            "symptoms": [
                [result.law for result in each.results] for each in self.symptoms()
            ],
            "severities": [SEVERITIES[each.severity] for each in self.symptoms()],
            "laws_to_look_at_first": [
                each.law for each in self.laws_to_look_at_first()
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
            f"| {each.law} | {each.area.replace('_', ' ')} | {each.status} | {each.count}"
            f" | {each.seconds:.1f} |"
            for each in self.results
        ]
        for symptom in self.symptoms():
            first = symptom.first
            lines += ["", f"## {symptom.title}", ""]
            lines += [f"Severity: {SEVERITIES[symptom.severity]}.", ""]
            lines.append(self.describe(first))
            lines += ["", "Laws:", ""]
            lines += [f"- {each.law}" for each in symptom.results]
        lines += self._undeclared()
        if first_laws := self.laws_to_look_at_first():
            lines += ["", f"## {heading_of(first_laws)}", ""]
            lines += [f"1. {each.law}: {each.summary}" for each in first_laws]
        return "\n".join(lines) + "\n"

    def to_junit(self) -> str:
        """Return the report as JUnit XML: one test case per law, and a failure per symptom."""
        suite = ElementTree.Element("testsuite", name=self.implementation)
        failed = errors = skipped = 0
        for each in self.results:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{self.implementation}.{each.area}",
                name=each.law,
                time=f"{each.seconds:.2f}",
            )
            text = _without_control(self.describe(each))
            if each.status in (Status.BROKEN, Status.UNEXPECTED):
                failed += 1
                _child(case, "failure", each, text)
            elif not each.ok:
                errors += 1
                _child(case, "error", each, text)
            elif each.status != Status.HELD:
                skipped += 1
                _child(case, "skipped", each, "")
        seconds = sum(each.seconds for each in self.results)
        counts = {"failures": failed, "errors": errors, "skipped": skipped}
        suite.attrib |= {name: str(count) for name, count in counts.items()}
        suite.attrib |= {"tests": str(len(self.results)), "time": f"{seconds:.2f}"}
        found = ElementTree.tostring(suite, encoding="unicode")
        return f'<?xml version="1.0" encoding="utf-8"?>\n{found}\n'

    def why_undeclared(self) -> dict[str, int]:
        """Return each reason why laws are undeclared, with the number of laws."""
        undeclared = [each for each in self.results if each.status == Status.OUTSIDE]
        reasons = Counter(
            "operations that are not declared"
            if each.reason.startswith("needs ")
            else each.reason
            for each in undeclared
        )
        return dict(reasons.most_common())

    def outcomes_outside(self) -> list[tuple[str, str]]:
        """Return the outcome and the sentence of each law that was tried outside of the support.

        Laws without a case outside are left out.
        """
        return [
            (OUTCOMES.get(each.status, str(each.status)), f"{each.law}: {each.summary}")
            for each in self.outside
            if each.cases > each.skipped or not each.ok
        ]

    def _undeclared(self) -> list[str]:
        """Return the sections about laws without a verdict, and about cases outside of SUPPORT."""
        lines: list[str] = []
        if reasons := self.why_undeclared():
            lines += ["", "## Why laws are undeclared", ""]
            lines += [f"- {count}: {reason}" for reason, count in reasons.items()]
        if self.unfinished:
            lines += ["", "## Laws that are not finished", ""]
            lines += [f"- {each.law}: {each.reason}" for each in self.unfinished]
        if self.notes:
            lines += ["", "## Notes", "", *(f"- {each}" for each in self.notes)]
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


def severity_of(result: Result) -> int:
    """Return the index of a failure in SEVERITIES."""
    if result.status == Status.MISSING:
        return 7
    if result.status == Status.UNEXPECTED:
        return 8
    if result.status == Status.NOT_TRIED:
        return 9
    if result.status not in (Status.BROKEN, Status.KNOWN):
        return 0
    if re.search(r"\baround |, which is only read$", result.what):
        return 1
    if "poison" in result.cause:
        return 2
    if result.right == "an error":
        return 6
    if result.message:
        return 5
    share = re.search(r"([\d.e+]+) times (?:the row's|its) budget", result.where)
    is_slight = share is not None and float(share[1]) < CLEARLY_WRONG
    return 4 if is_slight else 3


OUTCOMES = {Status.HELD: "right", Status.BROKEN: "wrong"}
"""Outcomes of laws on cases outside of the declared support; others keep their name."""


def heading_of(results: Sequence[Result]) -> str:
    """Return the heading of the list of laws to look at first."""
    words = {1: "The law", 2: "The two laws", 3: "The three laws"}
    return f"{words[len(results)]} to look at first"


def size_of_input(result: Result) -> tuple[bool, bool, int]:
    """Return a sort key: results with an input first, batches before other inputs, by length.

    The lengths in a batch can be read, and it has been made as small as possible.
    """
    is_batch = result.case.startswith("BatchPlan(")
    return not result.case, not is_batch, len(result.case)


def _kind_of_cause(cause: str) -> str:
    """Return where NaN comes from, without the numbers of tokens, slots and blocks."""
    kinds = (NOT_WRITTEN, WITHOUT_POISON, AROUND, AROUND_QUERY)
    for words in (*kinds, "a block that no request uses"):
        if words in cause:
            is_poison = "poison" in cause
            return f"the output {'contains the poison of ' * is_poison}{words}"
    return "the output contains the poison of slots past seq_len"


def without_numbers(text: str) -> str:
    """Return a text with # for each number."""
    return re.sub(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", "#", text)


def _kind_of_value(found: str, right: str) -> str:
    """Return what kind of value was found instead of which kind."""
    kinds = []
    for text in (found, right):
        try:
            value = float(text)
        except ValueError:
            kinds.append(without_numbers(text))
            continue
        special = value == 0 or value - value != 0  # 0, inf or NaN
        kinds.append(f"{value:g}" if special else "a number")
    return " instead of ".join(kinds)
