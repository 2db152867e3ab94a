"""Attention sinks: one score per head takes part in the softmax and has no value.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024; gpt-oss,
2025 (learned sinks).
"""

import torch
from torch import Tensor


def add_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return [query_heads, queries], the log-sum-exp of the keys' scores and the sink.

    Args:
        lse: [query_heads, queries], over the keys alone.
        sinks: [query_heads].
    """
    return torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
