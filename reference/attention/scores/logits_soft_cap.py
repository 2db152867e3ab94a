"""Soft cap: a scaled score s becomes c * tanh(s / c), which is between -c and c.

Source: Gemma 2, 2024, section 2 ("logit soft-capping").
"""

from torch import Tensor

from ..requests.request import RequestView


def modify(scores: Tensor, cap: float, request: RequestView) -> Tensor:
    """Return [query_heads, queries, keys], capped scores."""
    return cap * (scores / cap).tanh()
