"""Scores: what is done to the scaled dot products. One file per option, composed here."""

from torch import Tensor

from ....contract.attention_options import AttentionOptions
from ..requests.request import Request
from . import alibi, position_bias, soft_cap

MODIFICATIONS = {
    "logits_soft_cap": soft_cap.modify,
    "alibi_slopes": alibi.modify,
    "position_bias": position_bias.modify,
}
"""Score functions by option, in the order in which they are applied."""


def modify_scores(
    scores: Tensor, request: Request, options: AttentionOptions
) -> Tensor:
    """Return [query_heads, queries, keys], scaled scores with all modifications."""
    for name, modify in MODIFICATIONS.items():
        if getattr(options, name) is not None:
            scores = modify(scores, getattr(options, name), request)
    return scores
