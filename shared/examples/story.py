"""Worked examples: the classes of an example and of its story.

An example is a doctest that both twins must pass, and a story that explains it step by step. The
doctest is read from the docstring of the reference. Every number of a story is an expression that
the tests evaluate, so no step can be wrong.
"""

import doctest
import inspect
from dataclasses import dataclass
from functools import cache

from ..contract.operations import load_implementation


@dataclass(frozen=True)
class StoryStep:
    """One step of a story.

    Args:
        text: what happens, in a sentence with its numbers.
        expression: the same as Python; it may use every name of the example.
        value: repr of the expression's value.
        step: words of the `# step:` comment that it explains; empty if there is none.
    """

    text: str
    expression: str
    value: str
    step: str = ""


@dataclass(frozen=True)
class Example:
    """One call of an operation, what it shows, and why.

    Args:
        operation: the operation that it calls; "forward" for the backend.
        title: its content, in a sentence.
        story: the steps to the result.
        own_code: the doctest, if no docstring has it. If empty, the example is the one in the
            docstring of the reference.
    """

    operation: str
    title: str
    story: tuple[StoryStep, ...]
    own_code: str = ""

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The doctest as pairs of source text and output, which may be empty.

        Raises:
            ValueError: the docstring has no example.
        """
        return _calls_of(self.own_code or _docstring_of(self.operation))

    @property
    def code(self) -> str:
        """The calls as a doctest, without the sentences between them."""
        lines = []
        for source, output in self.calls:
            lines.append(">>> " + source.replace("\n", "\n... "))
            lines += [output] * bool(output)
        return "\n".join(lines) + "\n"


@cache
def _docstring_of(operation: str) -> str:
    """Return the docstring of the reference, which is imported at the first call."""
    found = inspect.getdoc(getattr(load_implementation("reference"), operation)) or ""
    if ">>>" not in found:
        raise ValueError(
            f"the docstring of {operation} has no example: expected one after Example:"
            " (python -OO removes docstrings; run python without it)"
        )
    return found


def _calls_of(code: str) -> tuple[tuple[str, str], ...]:
    parsed = doctest.DocTestParser().get_examples(code)
    return tuple((call.source.rstrip(), call.want.rstrip()) for call in parsed)
