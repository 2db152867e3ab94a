"""Softmax of scores, and of the log-sum-exps of partial results.

Both subtract the largest number and divide the exponentials by their own sum.
"""

import functools

import torch
from torch import Tensor

from .scores.sinks import with_sinks


def softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights and log-sum-exp.

    The largest score is subtracted from all, so that no exponential overflows. Exponentials are
    divided by their own sum, so that weights sum to 1 whatever the size of the scores is. The
    formula exp(score - lse) would round the log-sum-exp first: at scores of 1e8 its last digit is
    8, so n equal keys would have the weight exp(0) = 1 each. A query without a visible key has
    weights 0 and log-sum-exp -inf.

    Args:
        scores: [query_heads, queries, keys]; -inf if masked.
        sinks: Optional. [query_heads]. If None, no sink is added.

    Returns:
        [query_heads, queries, keys] in the dtype of the scores, and [query_heads, queries] in
        float32 or float64.
    """
    scores = with_sinks(scores, sinks)
    largest = scores.amax(dim=2, keepdim=True)
    # -inf - -inf is NaN
    p = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0.0))
    # float16 ends at 65,504, which many keys exceed; a sum without a visible key is 0
    total = p.sum(
        dim=2, keepdim=True, dtype=torch.promote_types(p.dtype, torch.float32)
    )
    weights = (p / total.clamp(min=1.0)).to(p.dtype)
    return weights[:, :, 1:], (largest + total.log()).squeeze(2)


def share_weight(lses: Tensor, base: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return each partial result's share of the total weight, and the joint log-sum-exp.

    Args:
        lses: [parts, ...] log-sum-exps, -inf for empty sets.
        base: The natural logarithm of the base of the log-sum-exps.

    Returns:
        [parts, ...], which sum to 1, or are 0 where all sets are empty; and [...] in that base.
    """
    largest = lses.amax(0)
    # -inf - -inf is NaN
    weights = torch.exp((lses - largest.masked_fill(largest == -torch.inf, 0.0)) * base)
    # one after another, so that the result does not depend on the shape
    total = functools.reduce(torch.add, weights)
    return weights / total.clamp(min=1.0), largest + total.log() / base
