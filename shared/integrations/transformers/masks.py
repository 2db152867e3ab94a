"""Token columns and position biases, read back from the tensors that the library passes.

The library describes padding, causality and windows by one bool tensor, query by key. The twins
take numbers: the tokens of each request, window, chunk. So the tensor is converted to numbers, and
then compared with the mask that those numbers mean, element by element. A mask that contains
anything else raises an error.

The columns of a mask need not be those of the queries and the keys before them. A static cache has
columns for tokens that do not exist yet. So no position is derived from the width of a mask: the
keys are those that a query attends to, and the queries are the last tokens of their keys.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...validation.library_masks import (
    check_alignment,
    check_bidirectional_positions,
    check_mask,
    check_one_position,
    check_same_mask,
    is_additive_padding,
    raise_unsupported_bias,
)

PADDING = "_pagetwin_padding"
"""The attribute of a mask that says which of its queries are padding, [reqs, query_len] bool."""

CONTENTS = "_pagetwin_contents"
"""The attribute of a tensor that holds what was read from it, and a copy of its elements."""

Found = TypeVar("Found")


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

    def mask(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return [reqs, query_len, key_len] which keys the queries attend to.

        Args:
            keys: [reqs, key_len] bool, the columns that are keys. Positions count these alone.
            positions: [reqs, query_len] position of each query.
        """
        key, query = (keys.cumsum(1) - 1)[:, None, :], positions[:, :, None]
        shown = keys[:, None, :].expand(-1, positions.shape[1], -1)
        if self.causal:
            shown = shown & (key <= query)
        if self.sliding_window is not None:
            shown = shown & ((key - query).abs() < self.sliding_window)
        if self.attention_chunk_size is not None:
            chunk = self.attention_chunk_size
            shown = shown & (key // chunk == query // chunk)
        return shown


@dataclass(frozen=True)
class PaddedColumns:
    """The columns of a padded batch that are computed.

    Args:
        queries: [reqs, query_len] bool, on the CPU. The other queries are padding; their output
            is 0.
        keys: [reqs, key_len] bool, on the CPU. No query attends to the other keys.
    """

    queries: Tensor
    keys: Tensor


def remembered(tensor: Tensor, key: Hashable, read: Callable[[], Found]) -> Found:
    """Return `read()`, or what it returned for the same elements of the same tensor.

    All layers of a model get the same mask. Its owner may write to it between two runs, in ways
    that torch does not count. So the elements are compared with a copy.

    Args:
        tensor: the tensor that is read. The results are stored with it.
        key: everything else that the result depends on.
        read: reads the tensor.
    """
    known = tensor.__dict__.get(CONTENTS)
    if known is None or not torch.equal(known[0], tensor):
        known = tensor.__dict__[CONTENTS] = (tensor.clone(), {})
    results: dict[Hashable, Found] = known[1]
    if key not in results:
        results[key] = read()
    return results[key]


def read_padded_columns(
    mask: Tensor | None,
    num_reqs: int,
    query_len: int,
    key_len: int,
    visible: VisibleRange,
) -> PaddedColumns:
    """Return which columns of a padded batch are computed.

    Args:
        mask: Optional. [reqs or 1, 1, query_len, key_len] bool, True where a query attends to a
            key; or [reqs, 1, 1, key_len] of the library's older models, 0 for tokens and the
            lowest number for padding. If None, no column is padding.
        num_reqs: rows of the batch.
        query_len, key_len: columns of the batch.
        visible: what the mask contains besides padding.

    Raises:
        TypeError: the mask is not bool.
        ValueError: the mask has another shape.
        NotImplementedError: the mask contains more than padding and `visible`.

    Example:
        Two requests of three tokens, the second padded on its left. The cache has room for one
        more token.

        >>> mask = torch.ones(2, 1, 3, 4, dtype=torch.bool).tril()
        >>> mask[1, :, :, 0] = False
        >>> read_padded_columns(mask, 2, 3, 4, VisibleRange(causal=True)).keys.tolist()
        [[True, True, True, False], [False, True, True, False]]
    """
    if mask is None:
        check_alignment(query_len, key_len, visible.causal)
        return PaddedColumns(
            *(torch.ones(num_reqs, n, dtype=torch.bool) for n in (query_len, key_len))
        )
    shown = bool_mask(mask, num_reqs, query_len, key_len)
    padding = mask.__dict__.get(PADDING)

    def read() -> PaddedColumns:
        # step: find the queries that are tokens
        if visible.causal:
            queries = shown.any(2) if padding is None else shown.any(2) & ~padding
        elif visible.depends_on_position:
            # the queries of an encoder have the columns of its keys
            check_bidirectional_positions(query_len, key_len)
            queries = shown.any(1)
        else:
            queries = shown.new_ones(num_reqs, query_len)
        # step: find the keys that they attend to
        keys = (shown & queries[:, :, None]).any(1)
        # step: build the mask that those columns mean, and compare
        positions = last_positions(queries, keys.sum(1))
        expected = visible.mask(keys, positions)
        check_same_mask(shown, expected, queries, visible.causal)
        return PaddedColumns(queries.cpu(), keys.cpu())

    return remembered(mask, (visible, num_reqs, query_len), read)


def bool_mask(mask: Tensor, num_reqs: int, query_len: int, key_len: int) -> Tensor:
    """Return [reqs, query_len, key_len] bool, True where a query attends to a key."""
    if is_additive_padding(mask):
        mask = (mask == 0).expand(-1, -1, query_len, -1)
    check_mask(mask, num_reqs, query_len, key_len)
    return mask[:, 0].expand(num_reqs, -1, -1)


def last_positions(queries: Tensor, num_keys: Tensor) -> Tensor:
    """Return [reqs, query_len] the positions of queries that are the last tokens of their keys.

    Args:
        queries: [reqs, query_len] bool, the queries that are tokens. For others the result has no
            meaning.
        num_keys: [reqs] keys of each request.
    """
    return (num_keys - queries.sum(1))[:, None] + queries.cumsum(1) - 1


def ragged_rows(columns: Tensor, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the rows of the flat batch that are computed, their starts, and the maximum count.

    Args:
        columns: [reqs, columns] bool, on the CPU.
        device: device of the results.

    Example:
        >>> rows, starts, longest = ragged_rows(
        ...     torch.tensor([[True, True, False], [False, True, False]]), "cpu"
        ... )
        >>> rows.tolist(), starts.tolist(), longest
        ([0, 1, 4], [0, 2, 3], 2)
    """
    lengths = columns.sum(1)
    starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    rows = columns.flatten().nonzero().flatten()
    longest = max(lengths.tolist(), default=0)
    return rows.to(device), starts.to(device), longest


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
    is_inclusive = any(
        bool(mask.diagonal(distance, -2, -1).any()) for distance in (window, -window)
    )
    return window + int(is_inclusive)


def read_position_bias(bias: Tensor | None, columns: PaddedColumns) -> Tensor | None:
    """Return a bias per query and key as a table per distance; None if it adds nothing.

    Args:
        bias: Optional. [1, query_heads, query_len, key_len]. If None, no bias is added.
        columns: the columns that are computed. They say at which key a query is.

    Returns:
        [query_heads, 2 * reach + 1] by the distance key - query, from -reach to reach.

    Raises:
        NotImplementedError: the bias depends on more than the distance.

    Example:
        Two queries after one more key: distances -2, -1, 0 and -1, 0, 1.

        >>> bias = torch.tensor([[[[2.0, 3.0, 4.0], [1.0, 2.0, 3.0]]]])
        >>> columns = PaddedColumns(*(torch.ones(1, n, dtype=torch.bool) for n in (2, 3)))
        >>> read_position_bias(bias, columns)
        tensor([[1., 2., 3., 4., 4.]])
    """
    if bias is None or not bool(bias.any()):
        return None
    query_len, key_len = columns.queries.shape[1], columns.keys.shape[1]
    if bias.shape[0] != 1 or bias.shape[2:] != (query_len, key_len):
        raise_unsupported_bias(list(bias.shape))
    # step: find the column of the first query's own key
    first = check_one_position(columns.queries, columns.keys)
    # step: the bias by distance; every distance that occurs is that of a first query or first key
    query = torch.arange(query_len, device=bias.device) + first
    key = torch.arange(key_len, device=bias.device)
    distance = key[None, :] - query[:, None]
    reach = int(distance.abs().max())
    table = bias.new_zeros(bias.shape[1], 2 * reach + 1)
    table[:, distance[:, 0] + reach] = bias[0, :, :, 0]
    table[:, distance[0] + reach] = bias[0, :, 0]
    # step: compare the bias with the table
    if not torch.equal(table[:, distance + reach], bias[0]):
        raise_unsupported_bias(list(bias.shape))
    return table.float()
