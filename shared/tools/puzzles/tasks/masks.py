"""Masks of the puzzles, by the brute-force oracle."""

from collections.abc import Callable

import torch
from torch import Tensor

from ....conformance.oracles.brute_force import OracleRequest, attend_by_hand


def mask_of(query_len: int, kv_len: int, window: int | None = None) -> Tensor:
    """Return which keys have weight in the oracle: causal, with an optional sliding window.

    All scores are 0. Key i has the value with 1 as element i, so that a row of the output is the
    weights of the keys.
    """
    mask = torch.zeros(query_len, kv_len, dtype=torch.bool)
    if mask.numel():
        request = OracleRequest(
            torch.zeros(query_len, 1, 1),
            torch.zeros(kv_len, 1, 1),
            torch.eye(kv_len)[:, None],
        )
        options = {"causal": True, "sliding_window": window}
        mask[:] = attend_by_hand([request], options, query_len).out[:, 0] > 0
    return mask


def by_rule(
    query_len: int, kv_len: int, is_visible: Callable[[int, int], bool]
) -> Tensor:
    """Return [query_len, kv_len] bool from a rule on the indices of query and key."""
    mask = torch.zeros(query_len, kv_len, dtype=torch.bool)
    for query in range(query_len):
        for key in range(kv_len):
            mask[query, key] = is_visible(query, key)
    return mask
