"""Conditions: values that source code does not decide, as expressions, and how they are joined."""

from typing import Any, NamedTuple

OPPOSITES = {
    "==": "!=",
    "<": ">=",
    ">": "<=",
    "in": "not in",
    "is": "is not",
    "%": "% not",
}
OPPOSITES |= {after: before for before, after in OPPOSITES.items()}


class Condition(NamedTuple):
    """A value that the source does not decide.

    Args:
        text: the expression that decides it.
        opposite: the expression of its opposite.
        word: "and" or "or" if that word joins the parts of `text`.
    """

    text: str
    opposite: str
    word: str = ""


class NotFollowed(Exception):
    """A statement or an expression that is not followed."""


def condition(text: str) -> Condition:
    """Return the condition of an expression."""
    return Condition(text, f"not {text}")


def negated(value: Any) -> Any:
    """Return the opposite of True, False or a condition."""
    if not isinstance(value, Condition):
        return not value
    word = {"and": "or", "or": "and"}.get(value.word, "")
    return Condition(value.opposite, value.text, word)


def joined(values: list[Any], word: str) -> Any:
    """Return what values joined by "and" or "or" give, without those that decide nothing."""
    decides = word == "or"
    left: list[Condition] = []
    for number, value in enumerate(values):
        if isinstance(value, Condition):
            left += [value] if value not in left else []
        elif bool(value) == decides or (not left and number == len(values) - 1):
            return value
    texts_of = {one.text for one in left}
    # (a or b) and a: a
    left = [
        one
        for one in left
        if not one.word
        or one.word == word
        or not texts_of & set(one.text.split(f" {one.word} "))
    ]
    if not left:
        return not decides
    if len(left) == 1:
        return left[0]
    other = "and" if decides else "or"
    texts = [f"({one.text})" if one.word == other else one.text for one in left]
    opposites = [
        f"({one.opposite})" if one.word == word else one.opposite for one in left
    ]
    return Condition(f" {word} ".join(texts), f" {other} ".join(opposites), word)


def either(test: Condition, first: Any, second: Any) -> Any:
    """Return what an `if` gives whose test is not decided."""
    if first == second:
        return first
    for value in (first, second):
        if not isinstance(value, (bool, Condition)):
            raise NotFollowed
    if first is True:
        return joined([test, second], "or")
    if second is True:
        return joined([negated(test), first], "or")
    chosen = joined([test, first], "and")
    return joined([chosen, joined([negated(test), second], "and")], "or")
