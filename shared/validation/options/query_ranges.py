"""Validation and generator of `query_ranges`: a range of keys per token, whatever masks them."""

import torch
from torch import Tensor

from ..option import Drawing, Option, OptionCall
from ..primitives import check_dtype, check_same_device


def validate(query_ranges: Tensor, call: OptionCall) -> None:
    """Raise if the ranges are not [tokens, 2] int32 on the device of the queries."""
    check_dtype("query_ranges", query_ranges, torch.int32)
    tokens = call.query.shape[0]
    if query_ranges.dim() != 2 or tuple(query_ranges.shape) != (tokens, 2):
        raise ValueError(
            f"query_ranges has shape {list(query_ranges.shape)}: expected [{tokens}, 2],"
            " first and last position for each token"
        )
    check_same_device(query=call.query, query_ranges=query_ranges)


def draw(name: str, drawing: Drawing) -> Tensor:
    """Return ranges: most contain their token, some are empty, some are another token's."""
    pick = drawing.pick
    ranges: list[tuple[int, ...]] = []
    for query_len, key_len in zip(drawing.query_lens, drawing.key_lens, strict=True):
        keys = max(key_len, 1)
        for token in range(query_len):
            position = max(0, key_len - query_len + token)
            around = (max(0, position - 9) // 4 * 4, min(position + 6, key_len - 1))
            ends = int(pick.random() * keys), int(pick.random() * keys)
            other = min(ends), max(ends)
            ranges.append(pick.choice([(-1, -1), around, around, other]))
    ranges += [(0, 2**31 - 1)] * drawing.padding
    return torch.tensor(ranges, dtype=torch.int32).view(-1, 2).to(drawing.device)


OPTION = Option(
    name="query_ranges",
    meaning="a range of keys that no other mask hides",
    default="no range",
    heading="ranges",
    values=("none", "ranges"),
    draw=draw,
    validate=validate,
)
