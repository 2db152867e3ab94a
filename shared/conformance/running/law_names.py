"""The names of all laws, read from their files.

Importing the laws imports torch and Hypothesis. So a name that no law has is reported before.
"""

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

LAWS = Path(__file__).parents[1] / "laws"
LAW = re.compile(r"^@law\(.*?^def (\w+)\(", re.M | re.S)


@cache
def law_names() -> tuple[tuple[str, str], ...]:
    """Return area and sentence of each law."""
    return tuple(
        (file.stem.removeprefix("laws_of_"), name.replace("_", " "))
        for file in sorted(LAWS.rglob("*.py"), key=lambda file: file.name)
        for name in LAW.findall(file.read_text(encoding="utf-8"))
    )


def has_words(area: str, law: str, only: str | None) -> bool:
    """Return whether the sentence or the area of a law contains some words."""
    return (only or "").lower() in f"{area} {law}".lower()


def check_words(only: str | None) -> None:
    """Raise if no law contains some words."""
    if not any(has_words(area, law, only) for area, law in law_names()):
        areas = ", ".join(dict.fromkeys(area for area, _ in law_names()))
        raise ValueError(f"only = {only!r}: no law contains it; areas are {areas}")


def check_known(names: Collection[str]) -> None:
    """Raise if a known failure is not the name of a law."""
    if unknown := sorted(set(names) - {law for _, law in law_names()}):
        raise ValueError(
            f"known_failures names {unknown}: expected sentences of laws, as a report shows them"
        )
