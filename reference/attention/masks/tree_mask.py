"""Tree mask: a drafted token attends to its ancestors, and to all keys before the tree.

Source: Miao et al., "SpecInfer", ASPLOS 2024, section 4.2 (tree-based parallel decoding).
"""

import torch
from torch import Tensor

from ..requests.request import RequestView


def visible(tree_mask: Tensor, request: RequestView) -> Tensor:
    """Return [queries, keys]: all keys of the context, and the new ones that the tree names.

    Args:
        tree_mask: [reqs, tree, tree].
        request: A request with more new tokens than `tree` has no tree, and is causal.
    """
    visible = torch.ones_like(request.distance, dtype=torch.bool)
    if request.tree is not None:
        visible[:, len(request.keys) - request.tree.shape[1] :] = request.tree
    return visible
