"""Grouped heads: keys and values in the dtype of the arithmetic, one head per query head.

Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", EMNLP 2023.
"""

import torch
from torch import Tensor

from ..cache.fp8 import per_head


def upcast_heads(
    tensor: Tensor, query_heads: int, dtype: torch.dtype, scale: Tensor | float | None
) -> Tensor:
    """Return keys or values as each query head reads them.

    Args:
        tensor: [keys, kv_heads, elements].
        query_heads: A multiple of kv_heads; query head h reads kv head
            h * kv_heads // query_heads.
        dtype: Of the result.
        scale: What FP8 elements are multiplied by. If None, they are not quantised.

    Returns:
        [keys, query_heads, elements].
    """
    tensor = tensor.to(dtype)
    if scale is not None:
        tensor = (tensor * per_head(scale)).to(dtype)
    return tensor.repeat_interleave(query_heads // tensor.shape[1], dim=1)
