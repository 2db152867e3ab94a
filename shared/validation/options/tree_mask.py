"""Validation and generator of `tree_mask`: which new token attends to which."""

import torch
from torch import Tensor

from ..option import Drawing, Option, OptionCall, Rejected
from ..primitives import check_dtype, check_same_device


def validate(tree_mask: Tensor, call: OptionCall) -> None:
    """Raise if the mask is not [reqs, tree, tree] bool, or if `causal` is given too."""
    check_dtype("tree_mask", tree_mask, torch.bool)
    shape = tree_mask.shape
    if tree_mask.dim() != 3 or shape[0] != call.reqs or shape[1] != shape[2]:
        raise ValueError(
            f"tree_mask has shape {list(shape)}: expected [{call.reqs}, tree, tree], a"
            " square of new tokens for each request"
        )
    check_same_device(query=call.query, tree_mask=tree_mask)
    if call.options.causal is not True:
        raise ValueError(
            "tree_mask is given beside causal: expected causal = True, since the tree mask"
            " replaces the causal one; a request without a tree has a lower triangle"
        )


def validate_diagonal(tree_mask: Tensor, query_lens: list[int]) -> None:
    """Raise if a new token does not attend to itself: its position follows from its ancestors."""
    width = tree_mask.shape[1]
    for req, own in enumerate(tree_mask.diagonal(dim1=1, dim2=2).tolist()):
        if query_lens[req] > width or all(own[: query_lens[req]]):
            continue
        token = own.index(False)
        raise ValueError(
            f"tree_mask[{req}, {token}, {token}] = False: expected True, as every new token"
            " attends to itself"
        )


def draw_trees(drawing: Drawing, width: int = 8) -> Tensor:
    """Return [reqs, width, width]; entries past a request's own tokens are set."""
    pick, query_lens = drawing.pick, drawing.query_lens
    mask = torch.ones(len(query_lens), width, width, dtype=torch.bool)
    for req, query_len in enumerate(query_lens):
        own = min(query_len, width)
        mask[req, :own, :own] = False
        for token in range(own):
            if token:
                mask[req, token, :own] = mask[req, pick.randrange(token), :own]
            mask[req, token, token] = True
    return mask


def draw(name: str, drawing: Drawing) -> Tensor:
    """Return a tree for each request whose new tokens are not more than its nodes."""
    return draw_trees(drawing).to(drawing.device)


OPTION = Option(
    name="tree_mask",
    meaning="which new token attends to which",
    default="no tree",
    heading="tree",
    values=("none", "tree"),
    draw=draw,
    validate=validate,
    rejected=(
        Rejected(
            "operation",
            ("encoder_attention",),
            "a tree follows the cached keys of its sequence",
            "tree_mask is given: expected None, since the keys and values are not read",
        ),
        Rejected(
            "causal",
            ("no", "each request", "cross"),
            "the tree mask replaces the causal mask",
            "tree_mask is given beside causal",
        ),
    ),
)
