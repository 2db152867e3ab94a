"""Partial results over a shared prefix: their place in the workspace, and merging with them.

The first launch of a cascade stores one partial result per row and split of the prefix: the
normalized average of the split's values, without their scale, and its log-sum-exp in base 2. The
second launch merges each row with them in float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .combine import fold_partials


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


class LoadedPartials(NamedTuple):
    """Partial results of a query tile's rows over some splits of the prefix.

    Args:
        result: [SPLITS, BLOCK_M, BLOCK_DV].
        lse: [SPLITS, BLOCK_M] in base 2, -inf for splits and rows that are not counted.
    """

    result: Any
    lse: Any


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
def load_prefix(
    prefix, rows, first_split, is_counted, config: tl.constexpr, SPLITS: tl.constexpr
):
    """Return the LoadedPartials of SPLITS splits of the prefix from `first_split` on.

    Args:
        rows: QueryRows.
        is_counted: whether the rows get them; each row gets its own once.
    """
    split = first_split + tl.arange(0, SPLITS)  # [SPLITS]
    dv = tl.arange(0, config.BLOCK_DV)
    token = split[:, None].to(tl.int64) * prefix.num_tokens + rows.token_index[None, :]
    row = token * prefix.num_heads + rows.head[None, :]  # [SPLITS, BLOCK_M]
    is_row = (rows.is_row & is_counted)[None, :] & (split < prefix.num_splits)[:, None]
    lse = tl.load(prefix.lse + row, mask=is_row, other=-float("inf"))
    result = tl.load(
        prefix.out + row[:, :, None] * config.V_HEAD_DIM + dv[None, None, :],
        mask=is_row[:, :, None] & (dv < config.V_HEAD_DIM)[None, None, :],
        other=0.0,
    )
    return LoadedPartials(result, lse)


@triton.jit
def fold_prefix(
    acc, l_i, m_i, loaded, prefix, rows, is_counted,
    config: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the running values of rows with their partial results over the prefix.

    Args:
        acc, l_i, m_i: [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M].
        loaded: LoadedPartials of the first SPLITS splits.
        rows, is_counted: as in `load_prefix`.
    """
    acc, l_i, m_i = fold_partials(acc, l_i, m_i, loaded.result, loaded.lse)
    if is_counted:
        for first_split in range(SPLITS, prefix.num_splits, SPLITS):
            more = load_prefix(prefix, rows, first_split, True, config, SPLITS)
            acc, l_i, m_i = fold_partials(acc, l_i, m_i, more.result, more.lse)
    return acc, l_i, m_i
