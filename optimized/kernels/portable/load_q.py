"""Loading of query tiles: the rows of a tile, and their queries.

A row is one query head of one new token. The rows of one kv head of a request are numbered token by
token, and head by head within a token, so that keys and values are read once for all query heads
that share them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .formats.cache_format import scale_queries


class QueryRows(NamedTuple):
    """The rows of a query tile.

    Args:
        query_len: new tokens of the request.
        first_row: first row of the tile.
        num_rows: rows of the request.
        token: [BLOCK_M] index in the request.
        token_index: [BLOCK_M] index in the batch.
        head: [BLOCK_M] query head.
        is_row: [BLOCK_M] whether the row exists.
    """

    query_len: Any
    first_row: Any
    num_rows: Any
    token: Any
    token_index: Any
    head: Any
    is_row: Any


@triton.jit
def find_queries(query_start_loc, req):
    """Return a request's first token in the batch, and how many it has."""
    start = tl.load(query_start_loc + req)
    return start, tl.load(query_start_loc + req + 1) - start


@triton.jit
def find_rows(start, query_len, first_row, kv_head, config: tl.constexpr):
    """Return the rows of a query tile.

    Args:
        start: index of the request's first token in the batch.
    """
    in_tile = tl.arange(0, config.BLOCK_M)
    return number_rows(start, query_len, first_row, in_tile, kv_head, config)


@triton.jit
def number_rows(start, query_len, first_row, in_tile, kv_head, config: tl.constexpr):
    """Return rows of a query tile.

    Args:
        start: index of the request's first token in the batch.
        in_tile: their indices in the tile.
    """
    row = first_row + in_tile
    token = row // config.GROUP_SIZE
    head = kv_head * config.GROUP_SIZE + row % config.GROUP_SIZE
    num_rows = query_len * config.GROUP_SIZE
    is_row = row < num_rows
    return QueryRows(query_len, first_row, num_rows, token, start + token, head, is_row)


@triton.jit
def load_q(call, rows, kv_head, config: tl.constexpr):
    """Return the queries of a tile, in parts, and the scale of their dot products.

    The scale is a number; with FP8 keys that are decoded to float16, and with rotated ones, it is
    [BLOCK_M, 1].

    Returns:
        q: [BLOCK_M, BLOCK_D].
        q_low: what is added to q, of the same shape; () unless the keys are rotated.
        q_rope: [BLOCK_M, BLOCK_ROPE], the elements after those of q; () without ROPE_DIM.
        qk_scale: the scale.
    """
    q_rope = ()
    q = load_q_columns(call, rows, 0, config.HEAD_DIM, config.BLOCK_D, config.UPCAST)
    if config.ROPE_DIM > 0:
        q_rope = load_q_columns(
            call, rows, config.HEAD_DIM, config.ROPE_DIM, config.BLOCK_ROPE,
            config.UPCAST,
        )  # fmt: skip
    return scale_queries(q, q_rope, call.scale, call, kv_head, config)


@triton.jit
def load_q_columns(
    call, rows, FIRST: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return COLUMNS elements of a tile's queries from FIRST on: [BLOCK_M, BLOCK]."""
    strides = call.strides
    d = tl.arange(0, BLOCK)
    q = tl.load(
        call.tensors.q
        + (rows.token_index.to(tl.int64) * strides.q_token)[:, None]
        + (rows.head.to(tl.int64) * strides.q_head)[:, None]
        + ((FIRST + d) * strides.q_element)[None, :],
        mask=rows.is_row[:, None] & (d < COLUMNS)[None, :],
        other=0.0,
    )
    return q.to(tl.float32) if UPCAST else q
