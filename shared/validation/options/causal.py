"""Validation and generator of `causal`: one flag, or one per request."""

import torch
from torch import Tensor

from ..option import Drawing, Option, OptionCall
from ..primitives import check_dtype, check_length, check_same_device


def validate(causal: bool | Tensor, call: OptionCall) -> None:
    """Raise if flags are not [reqs] bool on the device of the queries."""
    if isinstance(causal, Tensor):
        check_dtype("causal", causal, torch.bool)
        check_length("causal", causal, call.reqs, "requests")
        check_same_device(query=call.query, causal=causal)


def draw(name: str, drawing: Drawing) -> bool | Tensor:
    """Return a flag, or flags of which about half are set."""
    flags = [bool(req % 2) for req in range(len(drawing.query_lens))]
    drawing.pick.shuffle(flags)
    if name == "each request":
        return torch.tensor(flags, device=drawing.device)
    return name == "yes"


OPTION = Option(
    name="causal",
    meaning="a query attends to no key after itself; cross: not causal, more queries than keys",
    default="yes with pages, no in an encoder",
    values=("yes", "no", "each request", "cross"),
    draw=draw,
    validate=validate,
)
