"""Validation of the masks, position biases and padding of other libraries."""

from typing import NoReturn

import torch
from torch import Tensor


def check_mask(mask: Tensor, num_reqs: int, query_len: int, key_len: int) -> None:
    """Raise unless a mask is a bool tensor, query by key."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask is {mask.dtype}: expected torch.bool, True where a query attends to"
            " a key, or the two-dimensional mask of padding"
        )
    expected = [num_reqs, 1, query_len, key_len]
    if list(mask.shape) not in (expected, [1, *expected[1:]]):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}: expected {expected}, a column for each"
            " key"
        )


def is_additive_padding(mask: Tensor) -> bool:
    """Return whether a mask is one row per request, 0 for tokens and the lowest number else."""
    if not mask.is_floating_point() or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        return False
    lowest = torch.finfo(mask.dtype).min
    return bool(((mask == 0) | (mask <= lowest)).all())


def check_alignment(query_len: int, key_len: int, causal: bool) -> None:
    """Raise NotImplementedError for causal attention whose mask is needed and missing."""
    if causal and 1 < query_len != key_len:
        raise NotImplementedError(
            f"{query_len} queries and {key_len} keys without a mask: expected a mask, which says"
            " at which keys the queries are; or as many queries as keys, or one query"
        )


def check_bidirectional_positions(query_len: int, key_len: int) -> None:
    """Raise NotImplementedError for a window or a bias between two different sequences."""
    if query_len != key_len:
        raise NotImplementedError(
            f"{query_len} queries and {key_len} keys of a layer that is not causal and depends on"
            " positions: expected as many queries as keys"
        )


def check_same_mask(
    shown: Tensor, expected: Tensor, queries: Tensor, causal: bool
) -> None:
    """Raise for a mask that contains more than padding, causality, window and chunk.

    Args:
        shown: [reqs, query_len, key_len] the mask.
        expected: [reqs, query_len, key_len] what follows from padding, causality and window.
        queries: [reqs, query_len] bool, the queries that are compared.
        causal: whether the layer is causal; for the message.
    """
    differs = (expected != shown) & queries[:, :, None]
    if bool(differs.any()):
        req, query, key = differs.nonzero()[0].tolist()
        found = bool(shown[req, query, key])
        raise NotImplementedError(
            f"attention_mask[{req}, 0, {query}, {key}] = {found}: expected {not found}, which"
            f" follows from padding, causality (is_causal = {causal}) and window; other masks are"
            " not supported"
        )


def check_one_position(queries: Tensor, keys: Tensor) -> int:
    """Return the column of the first query's own key; raise if it is not the same for all.

    Args:
        queries: [reqs, query_len] bool, the queries that are computed.
        keys: [reqs, key_len] bool, the keys. Queries are the last of them.
    """
    found: set[int] = set()
    for of_queries, of_keys in zip(queries, keys, strict=True):
        rows, columns = (real.nonzero().flatten() for real in (of_queries, of_keys))
        if not len(rows) or not len(columns):
            continue
        for places in (rows, columns):
            if int(places[-1] - places[0]) + 1 != len(places):
                raise NotImplementedError(
                    "padding among the tokens of a layer with a position bias: expected padding"
                    " on the left or the right, as the bias counts padding too"
                )
        found.add(int(columns[-1]) - int(rows[-1]))
    if len(found) > 1:
        raise NotImplementedError(
            f"the first queries of the requests are at columns {sorted(found)} of one position"
            " bias: expected one column for all requests"
        )
    return found.pop() if found else keys.shape[1] - queries.shape[1]


def raise_unsupported_bias(shape: list[int]) -> NoReturn:
    """Raise NotImplementedError for a bias that is not a function of the distance."""
    raise NotImplementedError(
        f"position_bias of shape {shape} is not the same for all pairs of one distance:"
        " expected a bias by key - query alone"
    )
