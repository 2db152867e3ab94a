"""Groups of calls: the requests of many calls of one signature, and padded parts of them.

A part consists of requests of similar lengths, so that little of it is padding. All indices are
computed on the device from a few numbers per request. Nothing waits for the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cases.drawn_numbers import Ints, bits, to_device
from ..cases.options import Call
from ..cases.signed_calls import SignedCall

FEW_QUERIES = 8
"""Requests with at most as many queries are not padded together with longer ones."""


@dataclass(frozen=True)
class Costs:
    """What determines the parts of a group on one kind of device.

    Args:
        padding: Scores of padding that take about as long as the operations of a further part.
        scores: Maximum number of scores of a part, padding included, unless it is one request.
    """

    padding: int
    scores: int


COSTS = {"cpu": Costs(1 << 15, 1 << 22)}
COSTS_ON_GPU = Costs(1 << 22, 1 << 24)
"""A part takes about 100 launches, in whose time a GPU computes some million scores. 16 million
scores in float64 take 128 MiB, about five times at once, and a dozen processes share a GPU."""


@dataclass(frozen=True)
class Part:
    """Some requests of a group, padded to equal lengths. What padding contains is not specified.

    Args:
        call: The first call; options that are numbers are the same in all calls.
        query: [n, query_heads, queries, head_size].
        key, value: [n, kv_heads, keys, size] as in `Group`.
        query_lens, key_lens: [n].
        options: Tensors of options, with the first axis n, or [n, queries] for ranges.
        request, own: [rows] for each live row its request of the part, and its query of that.
    """

    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    query_lens: Tensor
    key_lens: Tensor
    options: dict[str, Tensor]
    request: Tensor
    own: Tensor


@dataclass(frozen=True)
class Group:
    """The requests of some calls that have queries, part after part.

    Args:
        call: The first call; options that are numbers are the same in all calls.
        query: [tokens, query_heads, head_size] of all calls.
        key, value: [keys, kv_heads, size] of all calls as the cache stores them, FP8 as float16.
        lens: Number of queries and of keys of each request, on the host.
        sizes: Number of requests of each part.
        query_lens, key_lens, query_starts, key_starts: [n] the lengths of each request, and its
            first rows in `query` and `key`.
        options: Tensors of options, with the first axis n. Ranges have a row per row of `query`.
        index, request, own, token: [rows] for each live row its call, its request, its query of
            the request, and its row of the call's output.
        out_scales: [calls] scale of an FP8 output; 1 for other outputs.
    """

    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    lens: tuple[Ints, Ints]
    sizes: list[int]
    query_lens: Tensor
    key_lens: Tensor
    query_starts: Tensor
    key_starts: Tensor
    options: dict[str, Tensor]
    index: Tensor
    request: Tensor
    own: Tensor
    token: Tensor
    out_scales: Tensor

    def parts(self) -> Iterator[Part]:
        """Yield the parts. Their live rows, one part after another, are those of the group."""
        first = row = 0
        for size in self.sizes:
            own = slice(first, first + size)
            queries, keys = (lens[own] for lens in self.lens)
            rows = slice(row, row + int(queries.sum()))
            yield self._part(own, rows, int(queries.max()), int(keys.max()))
            first, row = own.stop, rows.stop

    def _part(self, own: slice, rows: slice, queries: int, keys: int) -> Part:
        """Return the requests of a slice, whose live rows are another slice."""
        lens = self.query_lens[own], self.key_lens[own]
        at = _padded_rows(self.query_starts[own], lens[0], queries)
        of_keys = _padded_rows(self.key_starts[own], lens[1], keys)
        of_keys = of_keys.clamp_(max=max(0, len(self.key) - 1))
        options = {
            name: _rows_at(option, at) if name == "query_ranges" else option[own]
            for name, option in self.options.items()
        }
        return Part(
            call=self.call,
            query=_rows_at(self.query, at).transpose(1, 2),
            key=_rows_at(self.key, of_keys).transpose(1, 2),
            value=_rows_at(self.value, of_keys).transpose(1, 2),
            query_lens=lens[0],
            key_lens=lens[1],
            options=options,
            request=self.request[rows] - own.start,
            own=self.own[rows],
        )


def make_group(calls: Sequence[SignedCall], device: torch.device) -> Group:
    """Return the requests of calls of one signature on a device."""
    query_lens = np.array([length for call in calls for length in call.call.query_lens])
    key_lens = np.array([length for call in calls for length in call.call.key_lens])
    index = np.repeat(
        np.arange(len(calls)), [len(call.call.query_lens) for call in calls]
    )
    tokens = np.array([sum(call.call.query_lens) for call in calls])
    query_starts = np.cumsum(query_lens) - query_lens
    token = query_starts - (np.cumsum(tokens) - tokens)[index]
    costs = COSTS.get(device.type, COSTS_ON_GPU)
    parts = split_requests(query_lens, key_lens, calls[0].query.shape[1], costs)
    order = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    of_request = (
        order,
        index[order],
        token[order],
        query_lens[order],
        key_lens[order],
        query_starts[order],
        (np.cumsum(key_lens) - key_lens)[order],
    )
    facts = to_device(np.stack(of_request), device).unbind()
    request, own = ragged_rows(facts[3], int(query_lens.sum()))
    return Group(
        call=calls[0].call,
        query=torch.cat([call.query for call in calls]),
        key=_joined([call.keys for call in calls]),
        value=_joined([call.values for call in calls]),
        lens=(of_request[3], of_request[4]),
        sizes=[len(part) for part in parts],
        query_lens=facts[3],
        key_lens=facts[4],
        query_starts=facts[5],
        key_starts=facts[6],
        options=_options_of([call.call for call in calls], facts[0], facts[1]),
        index=facts[1][request],
        request=request,
        own=own,
        token=facts[2][request] + own,
        out_scales=_out_scales([call.call for call in calls], device),
    )


def split_requests(
    query_lens: Ints, key_lens: Ints, heads: int, costs: Costs
) -> list[Ints]:
    """Return the numbers of the requests that have queries, in parts of similar lengths.

    Args:
        query_lens, key_lens: Lengths of each request.
        heads: Number of query heads.
        costs: A part ends where a further request would add more padding, or too many scores.
    """
    live = np.flatnonzero(query_lens)
    is_long = query_lens[live] > FEW_QUERIES
    order = live[np.lexsort((query_lens[live], key_lens[live], is_long))]
    parts: list[list[int]] = []
    size = queries = keys = 0
    for req in order.tolist():
        new, own = int(query_lens[req]), int(key_lens[req])
        most = max(queries, new), max(keys, own)
        scores = heads * (size + 1) * most[0] * most[1]
        padding = scores - heads * (size * queries * keys + new * own)
        if not parts or scores > costs.scores or padding > costs.padding:
            parts.append([])
            size, most = 0, (new, own)
        parts[-1].append(req)
        size, (queries, keys) = size + 1, most
    return [np.array(part) for part in parts]


def ragged_rows(lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return for each row of ragged parts its part, and its index in that.

    Args:
        lens: [parts] rows of each part.
        total: Their sum, so that nothing waits for the device.
    """
    numbers = torch.arange(max(total, len(lens)), device=lens.device)
    part = torch.repeat_interleave(numbers[: len(lens)], lens, output_size=total)
    return part, numbers[:total] - (lens.cumsum(0) - lens)[part]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return rows of all tensors. Float16 holds all FP8 numbers."""
    rows = torch.cat([bits(tensor) for tensor in tensors])
    stored = tensors[0].dtype
    return rows.view(stored).half() if stored.itemsize == 1 else rows


def _padded_rows(starts: Tensor, lens: Tensor, longest: int) -> Tensor:
    """Return [n, longest] the rows of each request; after the last one, the last one again."""
    own = torch.arange(longest, device=starts.device)
    last = (lens - 1).clamp_(min=0)
    return torch.minimum(own, last[:, None]) + starts[:, None]


def _rows_at(rows: Tensor, at: Tensor) -> Tensor:
    """Return [n, longest, ...] rows by their indices."""
    return rows.index_select(0, at.flatten()).view(*at.shape, *rows.shape[1:])


def _out_scales(calls: Sequence[Call], device: torch.device) -> Tensor:
    """Return [calls] the scale of an FP8 output of each call."""
    scales = [call.arguments.get("out_scale", 1.0) for call in calls]
    if isinstance(scales[0], Tensor):
        return torch.stack([scale.reshape(()) for scale in scales]).double()
    return to_device(np.array(scales, dtype=np.float64), device)


PER_CALL = ("alibi_slopes", "position_bias", "sinks", "k_scale", "v_scale")
"""Tensors of options that all requests of a call share."""


def _options_of(
    calls: Sequence[Call], order: Tensor, index: Tensor
) -> dict[str, Tensor]:
    """Return the tensors of options of the requests, in their order."""
    found: dict[str, Tensor] = {}
    first = calls[0].arguments
    for name in PER_CALL:
        if isinstance(first.get(name), Tensor):
            tensors = [call.arguments[name] for call in calls]
            if name != "position_bias":
                tensors = [tensor.flatten() for tensor in tensors]
            found[name] = torch.stack(tensors).index_select(0, index)
    for name in ("causal", "tree_mask"):
        if isinstance(first.get(name), Tensor):
            tensors = [call.arguments[name] for call in calls]
            found[name] = torch.cat(tensors).index_select(0, order)
    if "query_ranges" in first:
        ranges = [
            call.arguments["query_ranges"][: sum(call.query_lens)] for call in calls
        ]
        found["query_ranges"] = torch.cat(ranges)
    return found
