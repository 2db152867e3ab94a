"""Validation and generator of `sliding_window`: keys on each side of a query."""

from ..option import Drawing, Option, OptionCall
from ..primitives import check_positive


def validate(sliding_window: int, call: OptionCall | None = None) -> None:
    """Raise if the window is not positive: a query attends at least to itself."""
    check_positive(sliding_window=sliding_window)


def draw(name: str, drawing: Drawing) -> int:
    """Return the window: one key, fewer keys than a tile has, or more."""
    return int(name)


OPTION = Option(
    name="sliding_window",
    meaning="keys on each side of a query, its own included",
    default="all",
    heading="window",
    values=("none", "1", "7", "33"),
    draw=draw,
    validate=validate,
)
