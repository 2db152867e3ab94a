"""Validation and generator of `position_bias`: one bias per head and distance."""

import torch
from torch import Tensor

from ..option import Drawing, Option, OptionCall
from ..primitives import check_dtype, check_same_device
from ..score_numbers import LARGEST_SCORE, check_score_numbers


def validate(position_bias: Tensor, call: OptionCall) -> None:
    """Raise if the table is not [query_heads, 2 * reach + 1] float32 on the queries' device."""
    check_dtype("position_bias", position_bias, torch.float32)
    shape = position_bias.shape
    if position_bias.dim() != 2 or shape[0] != call.heads or shape[1] % 2 == 0:
        raise ValueError(
            f"position_bias has shape {list(shape)}: expected [{call.heads}, 2 * reach + 1],"
            " an entry for each distance from -reach to reach"
        )
    check_same_device(query=call.query, position_bias=position_bias)
    if call.contents:
        # entries of distances that do not occur are never read, and may be NaN
        check_score_numbers(
            "position_bias",
            position_bias,
            LARGEST_SCORE,
            takes_masks=True,
            takes_nan=True,
        )


def bias_table(heads: int, reach: int = 4) -> Tensor:
    """Return [heads, 2 * reach + 1] biases, all different."""
    entries = torch.arange(heads * (2 * reach + 1))
    return torch.sin(7.0 * entries).view(heads, -1)


def draw(name: str, drawing: Drawing) -> Tensor:
    """Return a table that many distances exceed."""
    return bias_table(drawing.heads).to(drawing.device)


OPTION = Option(
    name="position_bias",
    meaning="a bias per distance",
    default="no bias",
    heading="bias",
    values=("none", "reach 4"),
    draw=draw,
    validate=validate,
)
