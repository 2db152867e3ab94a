"""Results: how a law ended, and how severe a failure is.

Laws that fail alike are one symptom: an implementation with one bug breaks many laws, and one
program is enough to reproduce it. The symptoms are ordered by severity.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
        details: What else is known, as numbers and words: "picture" is what
            `checks/pictures.py` draws of a failure; "signature", "counts" and "seconds" describe
            the batches of a signature; "note" is a sentence about something that is not a failure;
            "again" says what a failing input did when it was tried again, if it was something else.
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
        return "; ".join(part for part in (found or self.reason, again) if part)

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


def with_known(result: Result, reason: str | None) -> Result:
    """Return a result with its status adjusted for a known failure."""
    if reason is None or result.status == Status.UNFINISHED:
        return result
    holds = result.status in (Status.HELD, Status.OUTSIDE)
    return replace(
        result, status=Status.UNEXPECTED if holds else Status.KNOWN, reason=reason
    )


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
        return min(severity_of(result) for result in self.results)

    @property
    def title(self) -> str:
        """How many laws fail, and what they have in common."""
        count = len(self.results)
        status, failure = self.first.symptom
        if {result.message for result in self.results} == {self.first.message}:
            failure = self.first.message or failure
        return f"{count} law{'s' * (count > 1)} {status}: {failure}"


def symptoms_of(results: Iterable[Result]) -> list[Symptom]:
    """Return the failures, laws that fail alike together: the most severe symptom first.

    Of equally severe ones, those with a known cause come first.
    """
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        if not result.ok:
            key = (severity_of(result), *result.symptom)
            groups.setdefault(key, []).append(result)
    found = [
        Symptom(tuple(sorted(group, key=size_of_input))) for group in groups.values()
    ]
    return sorted(
        found,
        key=lambda symptom: (
            symptom.severity,
            not symptom.first.cause,
            -len(symptom.results),
            size_of_input(symptom.first),
        ),
    )


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
