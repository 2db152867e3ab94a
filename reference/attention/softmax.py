"""Softmax of scores, and their log-sum-exp, which combines partial results."""

import torch
from torch import Tensor

from .scores.sinks import add_sinks


def softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights and log-sum-exp.

    weight = exp(score - lse), with lse = log(sum(exp(score))). A query without a visible key has
    weights 0 and log-sum-exp -inf.

    Args:
        scores: [query_heads, queries, keys]; -inf if masked.
        sinks: Optional. [query_heads]. If None, no sink is added.

    Returns:
        [query_heads, queries, keys] and [query_heads, queries].
    """
    lse = scores.logsumexp(dim=2)
    if sinks is not None:
        lse = add_sinks(lse, sinks)
    # -inf - -inf is NaN
    finite = lse.masked_fill(lse.isinf(), 0.0)
    return torch.exp(scores - finite[:, :, None]), lse
