"""Sliding window: a query attends to W keys on each side, its own position included.

Source: Beltagy et al., "Longformer", 2020, section 3.1.
"""

from torch import Tensor

from ..requests.request import Request


def visible(sliding_window: int, request: Request) -> Tensor:
    """Return [queries, keys]: |key position - query position| < W."""
    return request.distance.abs() < sliding_window
