"""Attention of one request for the checks of the puzzles, by the brute-force oracle."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ....conformance.oracles.brute_force import OracleRequest, attend_by_hand


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention without a mask: output and log-sum-exp, rounded to float32.

    Args:
        query: [tokens, query_heads, head_size].
        key, value: [keys, kv_heads, head_size].
        scale: Factor of the scores.

    Returns:
        [tokens, query_heads, head_size] and [tokens, query_heads].
    """
    return attend_each([query], [key], [value], scale)


def attend_each(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention without a mask of several requests, as `attend`."""
    requests = [
        OracleRequest(query, key, value)
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    tokens = sum(len(query) for query in queries)
    answer = attend_by_hand(requests, {"causal": False, "scale": scale}, tokens)
    return answer.out.float(), answer.lse.T.float().contiguous()


def with_nan(result: Tensor, rows: Tensor) -> Tensor:
    """Return a result with NaN in some rows."""
    rows = rows.view(*rows.shape, *[1] * (result.dim() - rows.dim()))
    return result.masked_fill(rows, torch.nan)
