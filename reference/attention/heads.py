"""Grouped heads: keys and values with one head per query head.

Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", EMNLP 2023.
"""

from torch import Tensor


def repeat_heads(tensor: Tensor, query_heads: int) -> Tensor:
    """Return keys or values as each query head reads them.

    Args:
        tensor: [keys, kv_heads, elements].
        query_heads: A multiple of kv_heads; query head h reads kv head
            h * kv_heads // query_heads.

    Returns:
        [keys, query_heads, elements].
    """
    return tensor.repeat_interleave(query_heads // tensor.shape[1], dim=1)
