"""Groups of calls: the requests of many calls of one signature as padded tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..generators.drawn_numbers import rows_of, to_device
from ..generators.options import Call
from ..generators.signed_calls import SignedCall


@dataclass(frozen=True)
class Group:
    """The requests of some calls, padded to equal lengths. `n` counts requests over all calls.

    Args:
        call: The first call; options that are numbers are the same in all calls.
        query: [n, queries, query_heads, head_size].
        key, value: [n, keys, kv_heads, size] as the cache stores them.
        query_lens, key_lens: [n].
        options: Tensors of options, with the first axis n, or [n, queries] for ranges.
        index, request, own, token: [rows] for each live row its call, its request, its query of
            the request, and its row of the call's output.
        out_scales: [calls] scale of an FP8 output; 1 for other outputs.
    """

    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    query_lens: Tensor
    key_lens: Tensor
    options: dict[str, Tensor]
    index: Tensor
    request: Tensor
    own: Tensor
    token: Tensor
    out_scales: Tensor

    @property
    def scores(self) -> int:
        """Number of scores, padding included."""
        reqs, queries, heads, _ = self.query.shape
        return reqs * queries * heads * self.key.shape[1]


def make_group(calls: Sequence[SignedCall], device: torch.device) -> Group:
    """Return the requests of calls of one signature as padded tensors on a device."""
    query_lens = np.array([length for each in calls for length in each.call.query_lens])
    key_lens = np.array([length for each in calls for length in each.call.key_lens])
    reqs = np.array([len(each.call.query_lens) for each in calls])
    request, own = rows_of(query_lens)
    index = np.repeat(np.arange(len(calls)), reqs)[request]
    tokens = np.array([sum(each.call.query_lens) for each in calls])
    token = np.arange(len(index)) - (np.cumsum(tokens) - tokens)[index]
    rows = to_device(np.stack([index, request, own, token]), device).unbind()
    of_keys = to_device(np.stack(rows_of(key_lens)), device).unbind()
    lens = to_device(np.stack([query_lens, key_lens]), device)
    longest = int(query_lens.max(initial=0)), int(key_lens.max(initial=0))
    of_queries = Rows(len(query_lens), longest[0], rows[1], rows[2])
    key_rows = Rows(len(query_lens), longest[1], *of_keys)
    first = calls[0].call
    return Group(
        call=first,
        query=of_queries.pad([each.query for each in calls]),
        key=key_rows.pad([each.keys for each in calls]),
        value=key_rows.pad([each.values for each in calls]),
        query_lens=lens[0],
        key_lens=lens[1],
        options=_padded_options([each.call for each in calls], of_queries),
        index=rows[0],
        request=rows[1],
        own=rows[2],
        token=rows[3],
        out_scales=_out_scales([each.call for each in calls], device),
    )


@dataclass(frozen=True)
class Rows:
    """Places of ragged rows in a padded tensor.

    Args:
        count, longest: The first two sizes of the padded tensor.
        first, second: [rows] the indices of each row.
    """

    count: int
    longest: int
    first: Tensor
    second: Tensor

    def pad(self, parts: Sequence[Tensor], content: float = 0.0) -> Tensor:
        """Return [count, longest, ...] the rows of all parts, and `content` elsewhere."""
        # torch pads no FP8 numbers, all of which float16 holds
        rows = torch.cat([_padded_type(each) for each in parts]).to(self.first.device)
        padded = rows.new_full((self.count, self.longest, *rows.shape[1:]), content)
        padded[self.first, self.second] = rows
        return padded


def _padded_type(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.element_size() == 1 else tensor


def _out_scales(calls: Sequence[Call], device: torch.device) -> Tensor:
    """Return [calls] the scale of an FP8 output of each call."""
    scales = [call.arguments.get("out_scale", 1.0) for call in calls]
    if isinstance(scales[0], Tensor):
        return torch.stack([each.reshape(()) for each in scales]).double()
    return to_device(np.array(scales, dtype=np.float64), device)


PER_CALL = ("alibi_slopes", "position_bias", "sinks", "k_scale", "v_scale")
"""Tensors of options that all requests of a call share."""


def _padded_options(calls: Sequence[Call], rows: Rows) -> dict[str, Tensor]:
    """Return the tensors of options of all requests, one after another."""
    found: dict[str, Tensor] = {}
    first = calls[0].arguments
    for name in PER_CALL:
        if isinstance(first.get(name), Tensor):
            found[name] = torch.cat(
                [
                    call.arguments[name]
                    .flatten()[None]
                    .expand(len(call.query_lens), -1)
                    if name != "position_bias"
                    else call.arguments[name][None].expand(len(call.query_lens), -1, -1)
                    for call in calls
                ]
            )
    for name in ("causal", "tree_mask"):
        if isinstance(first.get(name), Tensor):
            found[name] = torch.cat([call.arguments[name] for call in calls])
    if "query_ranges" in first:
        ranges = [
            call.arguments["query_ranges"][: sum(call.query_lens)] for call in calls
        ]
        found["query_ranges"] = rows.pad(ranges, -1)
    return found
