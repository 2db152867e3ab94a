"""Validation and generator of `sinks`: one score per query head that has no value."""

import torch
from torch import Tensor

from ..option import Drawing, Option, OptionCall
from ..primitives import check_dtype, check_length, check_same_device
from ..score_numbers import LARGEST_SCORE, check_score_numbers
from .alibi_slopes import slopes


def validate(sinks: Tensor, call: OptionCall) -> None:
    """Raise if the sinks are not [query_heads] float32 on the queries' device, or out of range."""
    check_dtype("sinks", sinks, torch.float32)
    check_length("sinks", sinks, call.heads, "query heads")
    check_same_device(query=call.query, sinks=sinks)
    if call.contents:
        check_score_numbers("sinks", sinks, LARGEST_SCORE, takes_masks=True)


def draw(name: str, drawing: Drawing) -> Tensor:
    """Return sinks, all different: with less weight than the keys, as much, or more."""
    sinks = slopes(drawing.heads, drawing.heads / 4).to(drawing.device)
    return sinks + drawing.pick.choice([-3.0, 0.0, 6.0])


OPTION = Option(
    name="sinks",
    meaning="a score that takes weight only",
    default="no sink",
    heading="sinks",
    values=("none", "sinks"),
    draw=draw,
    validate=validate,
)
