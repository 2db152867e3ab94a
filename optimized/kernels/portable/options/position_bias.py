"""Position bias: an entry of a table, chosen by key position - query position, is added."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class BiasTable(NamedTuple):
    """Strides of the [query_heads, 2 * reach + 1] table, and its reach."""

    stride_head: Any
    stride_entry: Any
    reach: Any


def lower(position_bias: Tensor | None) -> BiasTable | None:
    """Return the table's strides as an argument of the kernels."""
    if position_bias is None:
        return None
    return BiasTable(*position_bias.stride(), position_bias.shape[1] // 2)  # type: ignore[call-arg]


@triton.jit
def find_bias_rows(position_bias, table, rows):
    """Return a pointer to the entries of each row's head: [BLOCK_M]."""
    return position_bias + rows.head.to(tl.int64) * table.stride_head


@triton.jit
def add_position_bias(qk, bias, table, distance):
    """Return the scores with their bias: [BLOCK_M, BLOCK_N]."""
    entry = tl.minimum(tl.maximum(distance, -table.reach), table.reach)
    entry = (entry + table.reach) * table.stride_entry
    return qk + tl.load(bias[:, None] + entry)
