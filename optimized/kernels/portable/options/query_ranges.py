"""Query ranges: a query attends to one more range of keys, whatever else masks them.

Multimodal prefixes are such ranges: all tokens of an image attend to each other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class QueryRanges(NamedTuple):
    """[tokens, 2] int32 first and last position of each token's range, and its strides."""

    ranges: Any
    stride_token: Any
    stride_entry: Any


class RangeTile(NamedTuple):
    """[BLOCK_M] first and last position of the range of each row; last -1 if there is none."""

    first: Any
    last: Any


def lower(query_ranges: Tensor | None) -> QueryRanges | None:
    """Return the ranges as an argument of the kernels."""
    if query_ranges is None:
        return None
    return QueryRanges(query_ranges, *query_ranges.stride())


@triton.jit
def load_ranges(ranges, rows):
    """Return the ranges of a query tile's rows."""
    entry = ranges.ranges + rows.token_index.to(tl.int64) * ranges.stride_token
    first = tl.load(entry, mask=rows.is_row, other=-1)
    last = tl.load(entry + ranges.stride_entry, mask=rows.is_row, other=-1)
    return RangeTile(first, tl.where(first >= 0, last, -1))


@triton.jit
def widen_to_ranges(tile, begin, end, seq_len):
    """Return a query tile's bounds with the ranges of its rows."""
    lowest = tl.min(tl.where(tile.first >= 0, tile.first, seq_len), 0)
    begin = tl.minimum(begin, lowest)
    furthest = tl.minimum(tl.max(tile.last, 0) + 1, seq_len)
    end = tl.maximum(end, furthest)
    return begin, end


@triton.jit
def range_element_mask(tile, key_position, is_key):
    """Return which keys of a KV tile are in the row's range: [BLOCK_M, BLOCK_N]."""
    in_range = key_position[None, :] >= tile.first[:, None]
    in_range &= key_position[None, :] <= tile.last[:, None]
    return in_range & is_key[None, :]
