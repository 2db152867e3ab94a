"""Weights of attention, as figures show them.

The value of key k is the k-th unit vector, so the output of a query is its weights.
"""

from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions

BLOCK_SIZE = 4


def paged_weights(
    ops: Any,
    query_len: int,
    scores: list[float],
    nan_in: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return [query_len, keys] weights of one request with one head.

    Args:
        ops: The operations of an implementation.
        query_len: New tokens, the last ones of the sequence.
        scores: Score of each key, for all queries alike.
        nan_in: Optional. A slot of the last block whose value is NaN.
        **options: Of `AttentionOptions`.
    """
    keys = len(scores)
    row = list(range(ops.blocks_needed(keys, BLOCK_SIZE)))
    slots = len(row) * BLOCK_SIZE
    key = torch.zeros(slots, 1, 1)
    key[:keys, 0, 0] = torch.tensor(scores)
    value = torch.eye(slots)[:, None]
    if nan_in is not None:
        value[nan_in] = torch.nan
    shape = len(row), BLOCK_SIZE, 1, -1
    out: torch.Tensor = ops.paged_attention(
        torch.ones(query_len, 1, 1),
        key.view(shape),
        value.view(shape),
        torch.tensor([row], dtype=torch.int32),
        torch.tensor([0, query_len], dtype=torch.int32),
        torch.tensor([keys], dtype=torch.int32),
        query_len,
        keys,
        scale=1.0,
        options=AttentionOptions(**options),
    )
    return out[:, 0, :keys]
