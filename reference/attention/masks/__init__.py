"""Masks: which keys each query attends to. One file per option, composed here."""

import torch
from torch import Tensor

from ....contract.attention_options import AttentionOptions
from ..requests.request import Request
from . import attention_chunk, causal, query_ranges, sliding_window, tree

LIMITS = {
    "causal": causal.visible,
    "tree_mask": tree.visible,
    "sliding_window": sliding_window.visible,
    "attention_chunk_size": attention_chunk.visible,
}
"""Masks by option. A key is visible if all of these agree..."""

ADDITIONS = {"query_ranges": query_ranges.visible}
"""...or if one of these does."""


def visible_keys(request: Request, options: AttentionOptions) -> Tensor:
    """Return [queries, keys] bool, which query attends to which key."""
    shape = len(request.query_position), len(request.key_position)
    visible = torch.ones(shape, dtype=torch.bool, device=request.keys.device)
    for name, mask in LIMITS.items():
        if getattr(options, name) is not None:
            visible &= mask(getattr(options, name), request)
    for name, mask in ADDITIONS.items():
        if getattr(options, name) is not None:
            visible |= mask(getattr(options, name), request)
    return visible


def zero_masked(value: Tensor, visible: Tensor) -> Tensor:
    """Return [keys, heads, elements], with 0 for the values of keys that no query attends to.

    Such rows may hold NaN, and 0 * NaN = NaN.
    """
    return value.masked_fill(~visible.any(0)[:, None, None], 0.0)
