"""Validation and generator of `logits_soft_cap`: bound of the scores."""

import math

from ..option import Drawing, Option, OptionCall


def validate(logits_soft_cap: float, call: OptionCall) -> None:
    """Raise if the cap is not a finite number above 0."""
    if not (logits_soft_cap > 0 and math.isfinite(logits_soft_cap)):
        raise ValueError(
            f"logits_soft_cap = {logits_soft_cap}: expected a number above 0, or None for"
            " no cap"
        )


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
