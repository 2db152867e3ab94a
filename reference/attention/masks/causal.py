"""Causal mask: a query attends to the keys up to its own position.

Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.2.3.
"""

import torch
from torch import Tensor

from ..requests.request import Request


def visible(causal: bool | Tensor, request: Request) -> Tensor:
    """Return [queries, keys]: key position <= query position, if the request is causal.

    Args:
        causal: One flag, or [reqs].
        request: In a request with a tree, the tree takes the place of this mask.
    """
    is_causal = causal[request.index] if isinstance(causal, Tensor) else causal
    if not is_causal or request.tree is not None:
        return torch.ones_like(request.distance, dtype=torch.bool)
    return request.distance <= 0
