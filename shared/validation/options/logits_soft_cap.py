"""Validation and generator of `logits_soft_cap`: bound of the scores."""

from ..option import Drawing, Option, OptionCall
from ..score_numbers import check_soft_cap


def validate(logits_soft_cap: float, call: OptionCall) -> None:
    """Raise if the cap is not a number above 0 that float32 has."""
    check_soft_cap(logits_soft_cap)


def draw(name: str, drawing: Drawing) -> float:
    """Return the cap, low enough to change most scores."""
    return float(name)


OPTION = Option(
    name="logits_soft_cap",
    meaning="bounds every score",
    default="no cap",
    heading="cap",
    values=("none", "2.0"),
    draw=draw,
    validate=validate,
)
