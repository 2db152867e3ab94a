"""Validation and generator of `alibi_slopes`: one slope per query head."""

import torch
from torch import Tensor

from ..option import Drawing, Option, OptionCall
from ..primitives import check_dtype, check_length, check_same_device
from ..score_numbers import LARGEST_SLOPE, check_score_numbers


def validate(alibi_slopes: Tensor, call: OptionCall) -> None:
    """Raise if the slopes are not [query_heads] float32 on the queries' device, or out of range."""
    check_dtype("alibi_slopes", alibi_slopes, torch.float32)
    check_length("alibi_slopes", alibi_slopes, call.heads, "query heads")
    check_same_device(query=call.query, alibi_slopes=alibi_slopes)
    if call.contents:
        check_score_numbers(
            "alibi_slopes", alibi_slopes, LARGEST_SLOPE, takes_masks=False
        )


def slopes(heads: int, steepest: float = 0.5) -> Tensor:
    """Return [heads] slopes, all different."""
    return steepest * torch.arange(1.0, heads + 1) / heads


def draw(name: str, drawing: Drawing) -> Tensor:
    """Return slopes, slight or steep."""
    return slopes(drawing.heads, drawing.pick.choice([0.02, 0.5])).to(drawing.device)


OPTION = Option(
    name="alibi_slopes",
    meaning="a bias that grows with the distance",
    default="no bias",
    heading="ALiBi",
    values=("none", "slopes"),
    draw=draw,
    validate=validate,
)
