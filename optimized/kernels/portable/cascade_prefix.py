"""Partial results over a shared prefix: their place in the workspace, and merging with them.

The first launch of a cascade stores one partial result per row and split of the prefix: the
normalized average of the split's values, without their scale, and its log-sum-exp in base 2. The
second launch merges each row with them in float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..softmax import finite, start_softmax
from .combine import fold_partial


class PrefixPartials(NamedTuple):
    """The prefix that all requests share, and the partial results over it.

    Args:
        out: [splits, tokens, query_heads, value_size] float32.
        lse: [splits, tokens, query_heads] float32 in base 2.
        length: keys of the prefix, a multiple of the block size.
        num_splits, num_tokens, num_heads: sizes of `out`.
    """

    out: Any
    lse: Any
    length: Any
    num_splits: Any
    num_tokens: Any
    num_heads: Any


@triton.jit
def store_prefix(prefix, result, lse, rows, config: tl.constexpr):
    """Store the partial results of rows over the whole prefix, which is one split.

    Args:
        result, lse: [BLOCK_M, BLOCK_DV], and [BLOCK_M] in base 2.
    """
    row = rows.token_index.to(tl.int64) * prefix.num_heads + rows.head
    dv = tl.arange(0, config.BLOCK_DV)
    tl.store(prefix.lse + row, lse, mask=rows.is_row)
    is_value = rows.is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :]
    values = row[:, None] * config.V_HEAD_DIM + dv[None, :]
    tl.store(prefix.out + values, result, mask=is_value)


@triton.jit
def load_prefix(prefix, rows, split, config: tl.constexpr):
    """Return the partial results of rows over a split: [BLOCK_M, BLOCK_DV], and [BLOCK_M].

    Past the last split they are 0 and -inf.

    Args:
        rows: QueryRows.
        split: index of the split.
    """
    dv = tl.arange(0, config.BLOCK_DV)
    token = tl.cast(split, tl.int64) * prefix.num_tokens + rows.token_index
    row = token * prefix.num_heads + rows.head  # [BLOCK_M]
    is_row = rows.is_row & (split < prefix.num_splits)
    lse = tl.load(prefix.lse + row, mask=is_row, other=-float("inf"))
    result = tl.load(
        prefix.out + row[:, None] * config.V_HEAD_DIM + dv[None, :],
        mask=is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :],
        other=0.0,
    )
    return result, lse


@triton.jit
def fold_prefix(
    acc, l_i, m_i, prefix, rows, is_counted,
    config: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the running values of rows with their partial results over the prefix.

    The splits are folded on their own first: their layout in registers is not that of a product.

    Args:
        acc, l_i, m_i: [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M].
        rows: QueryRows.
        is_counted: whether the rows get them; each row gets its own once.
    """
    # loaded together, where they fit the registers
    AT_ONCE: tl.constexpr = 4 if BLOCK_M <= 16 else 1
    if is_counted:
        p_acc, p_l, p_m = start_softmax(BLOCK_M, config.BLOCK_DV)
        for first in range(0, prefix.num_splits, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                result, lse = load_prefix(prefix, rows, first + i, config)
                p_acc, p_l, p_m = fold_partial(p_acc, p_l, p_m, result, lse)
        m_new = tl.maximum(m_i, p_m)
        shift = finite(m_new)
        alpha = tl.exp2(m_i - shift)
        beta = tl.exp2(p_m - shift)
        acc = acc * alpha[:, None] + p_acc * beta[:, None]
        l_i = l_i * alpha + p_l * beta
        m_i = m_new
    return acc, l_i, m_i
