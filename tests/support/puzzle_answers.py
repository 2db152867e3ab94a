"""Right answers to the puzzles, and usual mistakes as changes of them (tests/tools/puzzles)."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "tools/puzzles"
MISTAKES = [
    (name, hint, texts)
    for name, by_hint in tomllib.loads(
        (FOLDER / "mistakes.toml").read_text(encoding="utf-8")
    ).items()
    for hint, mistakes in by_hint.items()
    for texts in mistakes
]
"""Puzzles, hints, and texts of the solution that are each followed by what replaces it."""


def solution_of(name: str) -> str:
    """Return the text of a right answer to a puzzle."""
    return (FOLDER / "solutions" / f"{name}.py").read_text(encoding="utf-8")


def mistaken(name: str, texts: list[str]) -> str:
    """Return the text of a right answer with its texts replaced.

    Args:
        name: The puzzle.
        texts: Texts that the answer has, each followed by what replaces it.
    """
    answer = solution_of(name)
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert old in answer
        answer = answer.replace(old, new)
    return answer
