"""Worked examples: the classes of an example and of its story.

An example is a doctest that both twins must pass, and a story that explains it step by step. Every
number of a story is an expression that the tests evaluate, so no step can be wrong.
"""

import doctest
from dataclasses import dataclass


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
        concept: name of its concept.
        operation: the operation that it calls; "forward" for the backend.
        title: its content, in a sentence.
        code: the doctest, as in the docstring of the reference.
        story: the steps to the result.
    """

    concept: str
    operation: str
    title: str
    code: str
    story: tuple[StoryStep, ...]

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The doctest as pairs of source text and output, which may be empty."""
        parsed = doctest.DocTestParser().get_examples(self.code)
        return tuple((each.source.rstrip(), each.want.rstrip()) for each in parsed)
