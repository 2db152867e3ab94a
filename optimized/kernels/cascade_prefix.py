"""Partial results over a shared prefix: their place in the workspace, and merging with them.

The first launch of a cascade stores one partial result per row: the normalized average of the
prefix's values, without their scale, and its log-sum-exp in base 2. The second launch merges each
row with it in float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .combine import fold_partial


class PrefixPartials(NamedTuple):
    """The prefix that all requests share, and the partial results over it.

    Args:
        out: [tokens, query_heads, value_size] float32.
        lse: [tokens, query_heads] float32 in base 2.
        length: keys of the prefix, a multiple of the block size.
        num_heads: query heads.
    """

    out: Any
    lse: Any
    length: Any
    num_heads: Any


@triton.jit
def prefix_offsets(prefix, rows, config: tl.constexpr):
    """Return the offset of each row's log-sum-exp, [BLOCK_M], and of its values."""
    row = rows.token_index.to(tl.int64) * prefix.num_heads + rows.head
    dv = tl.arange(0, config.BLOCK_DV)
    return row, row[:, None] * config.V_HEAD_DIM + dv[None, :]


@triton.jit
def store_prefix(prefix, result, lse, rows, config: tl.constexpr):
    """Store the partial results of rows: [BLOCK_M, BLOCK_DV], and [BLOCK_M] in base 2."""
    row, values = prefix_offsets(prefix, rows, config)
    dv = tl.arange(0, config.BLOCK_DV)
    tl.store(prefix.lse + row, lse, mask=rows.is_row)
    is_value = rows.is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :]
    tl.store(prefix.out + values, result, mask=is_value)


@triton.jit
def fold_prefix(acc, l_i, m_i, prefix, rows, is_counted, config: tl.constexpr):
    """Return the running values of rows with their partial results over the prefix.

    Args:
        acc, l_i, m_i: [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M].
        rows: QueryRows.
        is_counted: whether the rows get them; each row gets its own once.
    """
    row, values = prefix_offsets(prefix, rows, config)
    dv = tl.arange(0, config.BLOCK_DV)
    is_row = rows.is_row & is_counted
    lse = tl.load(prefix.lse + row, mask=is_row, other=-float("inf"))
    is_value = is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :]
    result = tl.load(prefix.out + values, mask=is_value, other=0.0)
    return fold_partial(acc, l_i, m_i, result, lse)
