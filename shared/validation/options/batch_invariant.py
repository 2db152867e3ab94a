"""Generator of `batch_invariant`: the same bits whatever else is in the batch."""

from ..option import Drawing, Option, OptionCall


def validate(batch_invariant: bool, call: OptionCall) -> None:
    """Accept both values."""


def draw(name: str, drawing: Drawing) -> bool:
    """Return whether rows are batch-invariant."""
    return name == "yes"


OPTION = Option(
    name="batch_invariant",
    meaning="the same bits whatever else is in the batch",
    default="no",
    values=("no", "yes"),
    draw=draw,
    validate=validate,
)
