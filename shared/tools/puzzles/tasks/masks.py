"""Masks of the puzzles, by the oracle's definition of visible keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from ....conformance.oracles.brute_force import places, sees


def mask_of(query_len: int, kv_len: int, window: int | None = None) -> Tensor:
    """Return the mask of the oracle: causal, and with a sliding window if there is one."""
    given = {"causal": True} | ({} if window is None else {"sliding_window": window})
    queries, keys = places(0, query_len, kv_len, given)
    return by_rule(
        query_len,
        kv_len,
        lambda query, key: sees(0, query, query, key, queries, keys, given),
    )


def by_rule(
    query_len: int, kv_len: int, is_visible: Callable[[int, int], bool]
) -> Tensor:
    """Return [query_len, kv_len] bool from a rule on the indices of query and key."""
    mask = torch.zeros(query_len, kv_len, dtype=torch.bool)
    for query in range(query_len):
        for key in range(kv_len):
            mask[query, key] = is_visible(query, key)
    return mask
