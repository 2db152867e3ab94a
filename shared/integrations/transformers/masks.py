"""Which keys does the library's mask show, said in lengths?

The library describes padding, causality and windows by one table of bools, query by key. The twins
want numbers instead: where a sequence begins and ends. So the table is read back into numbers, and
then held against what those numbers mean, entry by entry: a mask that says more than padding,
causality, window and chunk is refused, never half obeyed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...validation.integrations import check_mask, refuse_bias, refuse_mask


@dataclass(frozen=True)
class Sight:
    """How positions decide what is seen.

    Args:
        causal: whether a query sees no key behind it.
        sliding_window: keys to each side that a query sees, its own included; None: all.
        attention_chunk_size: keys of a chunk, of which a query sees its own; None: no chunks.
        biased: whether the distance between query and key changes a score.
    """

    causal: bool
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    biased: bool = False

    @property
    def counts_positions(self) -> bool:
        """Whether it matters where a query stands."""
        limits = (self.sliding_window, self.attention_chunk_size)
        return self.causal or self.biased or limits != (None, None)


@dataclass(frozen=True)
class Spans:
    """Where each request's tokens stand in a padded batch.

    Args:
        queries: for each request its first query and the one past its last.
        keys: for each request its first key and the one past its last.
    """

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]


def read_spans(
    mask: Tensor | None, num_reqs: int, query_len: int, key_len: int, sight: Sight
) -> Spans:
    """Return which tokens are no padding.

    Args:
        mask: [reqs or 1, 1, query_len, key_len] bool, True where a query sees a key; None: there
            is no padding.
        num_reqs: rows of the batch.
        query_len, key_len: columns of the batch; the queries are the last ones of the keys.
        sight: what the mask says beside padding.

    Raises:
        TypeError: a mask that is not bool.
        ValueError: a mask of another shape.
        NotImplementedError: a mask that says more than padding and `sight`.

    Example:
        Two requests of three tokens, the second padded on its left.

        >>> mask = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
        >>> mask[1, :, :, 0] = False
        >>> read_spans(mask, 2, 3, 3, Sight(causal=True)).keys
        [(0, 3), (1, 3)]
    """
    if mask is None:
        return Spans([(0, query_len)] * num_reqs, [(0, key_len)] * num_reqs)
    check_mask(mask, num_reqs, query_len, key_len)
    known = mask.__dict__.setdefault("_pagetwin_spans", {})
    if sight not in known:
        known[sight] = _read_spans(mask, num_reqs, query_len, key_len, sight)
    spans: Spans = known[sight]
    return spans


def _read_spans(
    mask: Tensor, num_reqs: int, query_len: int, key_len: int, sight: Sight
) -> Spans:
    shown = mask[:, 0].expand(num_reqs, -1, -1)
    # step: find the first and the last key that anybody sees
    seen = shown.any(1).int()
    is_empty = seen.sum(1) == 0
    first = seen.argmax(1).masked_fill(is_empty, 0)
    end = (key_len - seen.flip(1).argmax(1)).masked_fill(is_empty, 0)
    # step: find the queries that stand among them
    before = key_len - query_len
    query = torch.arange(query_len, device=mask.device)
    first_query, end_query = torch.zeros_like(first), torch.full_like(end, query_len)
    if sight.counts_positions:
        first_query, end_query = (first - before).clamp(min=0), (end - before).clamp(0)
    # step: write out what those numbers mean, and hold the mask against it
    key = torch.arange(key_len, device=mask.device)
    start, stop = first[:, None, None], end[:, None, None]
    position, key = (query + before)[None, :, None], key[None, None, :]
    meant = (key >= start) & (key < stop)
    if sight.causal:
        meant = meant & (key <= position)
    if sight.sliding_window is not None:
        meant = meant & ((key - position).abs() < sight.sliding_window)
    if sight.attention_chunk_size is not None:
        chunk = sight.attention_chunk_size
        meant = meant & ((key - start) // chunk == (position - start) // chunk)
    is_query = (query >= first_query[:, None]) & (query < end_query[:, None])
    differ = (meant != shown) & is_query[:, :, None]
    if bool(differ.any()):
        req, query_place, key_place = differ.nonzero()[0].tolist()
        refuse_mask(
            req, query_place, key_place, bool(shown[tuple(differ.nonzero()[0])])
        )
    return Spans(
        list(zip(first_query.tolist(), end_query.tolist(), strict=True)),
        list(zip(first.tolist(), end.tolist(), strict=True)),
    )


def read_position_bias(bias: Tensor | None) -> Tensor | None:
    """Return a bias of queries and keys as a table of their distance; None: it adds nothing.

    Args:
        bias: [1, query_heads, query_len, key_len]; the queries are the last ones of the keys.

    Returns:
        [query_heads, 2 * reach + 1] by the distance key - query, from -reach to reach.

    Raises:
        NotImplementedError: a bias that depends on more than the distance.

    Example:
        Two queries behind one more key: distances -2, -1, 0 and -1, 0, 1.

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
        refuse_bias(list(bias.shape))
    # step: the last query tells the distances up to 0, the first one those above
    before = key_len - query_len
    behind = bias[0, :, -1]
    ahead = bias[0, :, 0, before + 1 :]
    edge = torch.cat([behind, ahead], dim=1)[:, -1:]
    table = torch.cat([behind, ahead, edge.expand(-1, before)], dim=1)
    # step: hold the bias against the table
    query = torch.arange(query_len, device=bias.device) + before
    key = torch.arange(key_len, device=bias.device)
    distance = key[None, :] - query[:, None]
    if not torch.equal(table[:, distance + key_len - 1], bias[0]):
        refuse_bias(list(bias.shape))
    return table.float()
