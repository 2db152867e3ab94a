"""Attention sinks: one score per head takes part in the softmax and has no value.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024; gpt-oss,
2025 (learned sinks).
"""

import torch
from torch import Tensor


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return [query_heads, queries, 1 + keys], the sinks before the scores of the keys.

    Args:
        scores: [query_heads, queries, keys].
        sinks: Optional. [query_heads]. If None, they are -inf, which has no weight.
    """
    heads, queries, _ = scores.shape
    if sinks is None:
        sinks = scores.new_full((heads,), -torch.inf)
    column = sinks.to(scores.dtype)[:, None, None].expand(heads, queries, 1)
    return torch.cat([column, scores], dim=2)
