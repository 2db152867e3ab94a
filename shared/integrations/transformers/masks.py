"""Token ranges and position biases, read back from the tensors that the library passes.

The library describes padding, causality and windows by one bool tensor, query by key. The twins
take numbers: first and last token of each request, window, chunk. So the tensor is converted to
numbers, and then compared with the mask that those numbers mean, element by element. A mask that
contains anything else raises an error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...validation.integrations import (
    check_mask,
    raise_unsupported_bias,
    raise_unsupported_mask,
)


@dataclass(frozen=True)
class VisibleRange:
    """The keys that a layer's queries attend to, by position alone.

    Args:
        causal: whether a query attends only to keys up to its own position.
        sliding_window: Optional. Keys on each side that a query attends to, its own included. If
            None, the window is unlimited.
        attention_chunk_size: Optional. Keys per chunk; a query attends to its own chunk. If None,
            the sequence is not divided.
        has_bias: whether the distance between query and key changes the score.
    """

    causal: bool
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    has_bias: bool = False

    @property
    def depends_on_position(self) -> bool:
        """Whether a query's position changes its result."""
        limits = (self.sliding_window, self.attention_chunk_size)
        return self.causal or self.has_bias or limits != (None, None)


@dataclass(frozen=True)
class PaddedRanges:
    """The columns of a padded batch that are tokens and not padding.

    Args:
        queries: for each request its first query column, and the end (exclusive).
        keys: for each request its first key column, and the end (exclusive).
    """

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]


def read_padded_ranges(
    mask: Tensor | None,
    num_reqs: int,
    query_len: int,
    key_len: int,
    visible: VisibleRange,
) -> PaddedRanges:
    """Return which columns of a padded batch are tokens.

    Args:
        mask: Optional. [reqs or 1, 1, query_len, key_len] bool, True where a query attends to a
            key. If None, no column is padding.
        num_reqs: rows of the batch.
        query_len, key_len: columns of the batch; the queries are the last ones of the keys.
        visible: what the mask contains besides padding.

    Raises:
        TypeError: the mask is not bool.
        ValueError: the mask has another shape.
        NotImplementedError: the mask contains more than padding and `visible`.

    Example:
        Two requests of three tokens, the second padded on its left.

        >>> mask = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
        >>> mask[1, :, :, 0] = False
        >>> read_padded_ranges(mask, 2, 3, 3, VisibleRange(causal=True)).keys
        [(0, 3), (1, 3)]
    """
    if mask is None:
        return PaddedRanges([(0, query_len)] * num_reqs, [(0, key_len)] * num_reqs)
    check_mask(mask, num_reqs, query_len, key_len)
    # all layers get the same tensor, so the result is kept with it
    known = mask.__dict__.setdefault("_pagetwin_ranges", {})
    if visible not in known:
        known[visible] = _read_padded_ranges(
            mask, num_reqs, query_len, key_len, visible
        )
    ranges: PaddedRanges = known[visible]
    return ranges


def _read_padded_ranges(
    mask: Tensor, num_reqs: int, query_len: int, key_len: int, visible: VisibleRange
) -> PaddedRanges:
    shown = mask[:, 0].expand(num_reqs, -1, -1)
    # step: find the first and the last key that any query attends to
    attended = shown.any(1).int()
    is_empty = attended.sum(1) == 0
    first = attended.argmax(1).masked_fill(is_empty, 0)
    end = (key_len - attended.flip(1).argmax(1)).masked_fill(is_empty, 0)
    # step: find the queries at those positions
    num_before = key_len - query_len
    query = torch.arange(query_len, device=mask.device)
    first_query, end_query = torch.zeros_like(first), torch.full_like(end, query_len)
    if visible.depends_on_position:
        first_query = (first - num_before).clamp(min=0)
        end_query = (end - num_before).clamp(0)
    # step: build the mask that those numbers mean, and compare
    key = torch.arange(key_len, device=mask.device)
    start, stop = first[:, None, None], end[:, None, None]
    position, key = (query + num_before)[None, :, None], key[None, None, :]
    expected = (key >= start) & (key < stop)
    if visible.causal:
        expected = expected & (key <= position)
    if visible.sliding_window is not None:
        expected = expected & ((key - position).abs() < visible.sliding_window)
    if visible.attention_chunk_size is not None:
        chunk = visible.attention_chunk_size
        expected = expected & ((key - start) // chunk == (position - start) // chunk)
    is_query = (query >= first_query[:, None]) & (query < end_query[:, None])
    differs = (expected != shown) & is_query[:, :, None]
    if bool(differs.any()):
        index = differs.nonzero()[0]
        req, query_index, key_index = index.tolist()
        raise_unsupported_mask(req, query_index, key_index, bool(shown[tuple(index)]))
    return PaddedRanges(
        list(zip(first_query.tolist(), end_query.tolist(), strict=True)),
        list(zip(first.tolist(), end.tolist(), strict=True)),
    )


def read_bidirectional_window(mask: Tensor, window: int) -> int:
    """Return the keys on each side that a layer attends to, the query's own included.

    The models of the library count a bidirectional window differently: the distance to a visible
    key is less than it, or at most equal to it. The mask shows which.

    Args:
        mask: [reqs or 1, 1, query_len, key_len] bool, of a layer that is not causal.
        window: the window of the model's configuration.

    Example:
        >>> mask = torch.tensor([[[[1, 1, 0], [1, 1, 1], [0, 1, 1]]]]).bool()
        >>> read_bidirectional_window(mask, 1), read_bidirectional_window(mask, 2)
        (2, 2)
    """
    known = mask.__dict__.setdefault("_pagetwin_windows", {})
    if window not in known:
        known[window] = any(
            bool(mask.diagonal(distance, -2, -1).any())
            for distance in (window, -window)
        )
    return window + int(known[window])


def read_position_bias(bias: Tensor | None) -> Tensor | None:
    """Return a bias per query and key as a table per distance; None if it adds nothing.

    Args:
        bias: Optional. [1, query_heads, query_len, key_len]; the queries are the last ones of the
            keys. If None, no bias is added.

    Returns:
        [query_heads, 2 * reach + 1] by the distance key - query, from -reach to reach.

    Raises:
        NotImplementedError: the bias depends on more than the distance.

    Example:
        Two queries after one more key: distances -2, -1, 0 and -1, 0, 1.

        >>> read_position_bias(torch.tensor([[[[2.0, 3.0, 4.0], [1.0, 2.0, 3.0]]]]))
        tensor([[1., 2., 3., 4., 4.]])
    """
    if bias is None:
        return None
    if "_pagetwin_table" not in bias.__dict__:
        bias.__dict__["_pagetwin_table"] = _read_position_bias(bias)
    table: Tensor | None = bias.__dict__["_pagetwin_table"]
    return table


def _read_position_bias(bias: Tensor) -> Tensor | None:
    if not bool(bias.any()):
        return None
    _, _, query_len, key_len = bias.shape
    if bias.shape[0] != 1 or query_len > key_len:
        raise_unsupported_bias(list(bias.shape))
    # step: the last query has the distances up to 0, the first query those above
    num_before = key_len - query_len
    up_to_zero = bias[0, :, -1]
    above_zero = bias[0, :, 0, num_before + 1 :]
    edge = torch.cat([up_to_zero, above_zero], dim=1)[:, -1:]
    table = torch.cat([up_to_zero, above_zero, edge.expand(-1, num_before)], dim=1)
    # step: compare the bias with the table
    query = torch.arange(query_len, device=bias.device) + num_before
    key = torch.arange(key_len, device=bias.device)
    distance = key[None, :] - query[:, None]
    if not torch.equal(table[:, distance + key_len - 1], bias[0]):
        raise_unsupported_bias(list(bias.shape))
    return table.float()
