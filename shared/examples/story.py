"""What is a worked example?

A doctest that both twins must pass, and a story that walks through it. Every number of a story is
an expression which the tests evaluate, so no step can be wrong.
"""

import doctest
from dataclasses import dataclass


@dataclass(frozen=True)
class StoryStep:
    """One step of a story.

    Args:
        text: what happens, in a sentence with its numbers.
        expression: the same as Python; it may use every name of the example.
        value: what the expression shows.
        step: the words of the `# step:` comment this tells of; empty: the function has none.
    """

    text: str
    expression: str
    value: str
    step: str = ""


@dataclass(frozen=True)
class Example:
    """One call of an operation, what it shows, and why.

    Args:
        concept: the file it belongs to.
        operation: what it calls; "forward" for the backend.
        title: what it shows, in a sentence.
        code: the doctest, as it stands in the docstring of the reference.
        story: how the result comes about.
    """

    concept: str
    operation: str
    title: str
    code: str
    story: tuple[StoryStep, ...]

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The doctest as pairs: source text, and what it shows (empty: nothing)."""
        parsed = doctest.DocTestParser().get_examples(self.code)
        return tuple((each.source.rstrip(), each.want.rstrip()) for each in parsed)
