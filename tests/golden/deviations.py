"""Where pagetwin deviates from vLLM on purpose: rules, each a condition on the input.

A rule is a function of a case's inputs. It holds if and only if the result deviates in a field of
the rule, or if one side raises and the other does not ("raises" among the fields). Conditions never
read what vLLM returned, so a rule also predicts inputs that were not recorded.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Condition = Callable[[dict[str, Any]], bool]
RAISES = "raises"


@dataclass(frozen=True)
class Rule:
    """One deviation.

    Args:
        name: name of its condition.
        file: case file.
        fields: paths of `expected` that deviate, "[]" for any index, "*" for every field.
        reason: what vLLM does.
        right: what is right, in words.
        holds: the condition.
        value: Optional. What our field must be, a function of the inputs.
        versions: versions of vLLM that deviate; "" is the recorded one.
        twins: twins that deviate.
    """

    name: str
    file: str
    fields: tuple[str, ...]
    reason: str
    right: str
    holds: Condition
    value: Callable[[dict[str, Any]], Any] | None
    versions: tuple[str, ...]
    twins: tuple[str, ...]

    def covers(self, difference: str) -> bool:
        """Return whether a difference is in one of the rule's fields."""
        anywhere = re.sub(r"\[\d+\]", "[]", difference)
        return any(
            field == "*"
            # the host's copy of a field deviates with it; another field, such as
            # seq_lens_tensor beside seq_lens, needs a rule of its own
            or re.match(rf"\.{re.escape(field)}(_cpu|_float)?(?!\w)", path)
            for field in self.fields
            for path in (difference, anywhere)
        )


RULES: list[Rule] = []
BOTH = ("reference", "optimized")


def deviation(
    *files: str,
    fields: Sequence[str],
    right: str,
    value: Callable[[dict[str, Any]], Any] | None = None,
    versions: tuple[str, ...] = ("",),
    twins: tuple[str, ...] = BOTH,
) -> Callable[[Condition], Condition]:
    """Register a condition as a rule of some case files. Its docstring says what vLLM does."""

    def register(condition: Condition) -> Condition:
        reason = " ".join((condition.__doc__ or "").split())
        for file in files:
            RULES.append(
                Rule(
                    getattr(condition, "__name__", "rule"),
                    file,
                    tuple(fields),
                    reason,
                    right,
                    condition,
                    value,
                    versions,
                    twins,
                )
            )
        return condition

    return register


def rules_that_hold(
    file: str, inputs: dict[str, Any], twin: str, version: str
) -> list[Rule]:
    """Return the rules whose condition holds for an input, in the order of their registration."""
    return [
        rule
        for rule in RULES
        if rule.file == file
        and twin in rule.twins
        and version in rule.versions
        and rule.holds(inputs)
    ]


def needless_rules(rules: Sequence[Rule], differences: Sequence[str]) -> Iterator[str]:
    """Yield the rules that hold and explain no difference that the others leave unexplained."""
    for rule in rules:
        others = [other for other in rules if other is not rule]
        if not any(broken_predictions(others, differences)):
            yield f"{rule.name} holds, but the other rules explain all differences"


def broken_predictions(
    rules: Sequence[Rule], differences: Sequence[str]
) -> Iterator[str]:
    """Yield where the rules that hold and the differences found do not agree.

    Every difference belongs to one rule: the first one that holds and has its field. Every rule
    that holds has a difference. If one side raises, no field can be compared, and a rule predicts
    that.
    """
    raising = [rule for rule in rules if RAISES in rule.fields]
    is_raise = any(difference.startswith(".raises:") for difference in differences)
    if is_raise and not raising:
        yield f"{differences[0]}: predicted by no rule"
    if raising and not is_raise:
        yield f"{raising[0].name} holds, but both sides return or both raise"
    if is_raise or raising:
        return
    for difference in differences:
        if not any(rule.covers(difference) for rule in rules):
            yield f"{difference}: covered by no rule"
    for rule in rules:
        if not any(rule.covers(difference) for difference in differences):
            yield f"{rule.name} holds, but no field of {', '.join(rule.fields)} differs"
