"""Work items over a shared prefix: query tiles of all tokens, and splits of the prefix."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.work_item import WorkItem


class PrefixRows(NamedTuple):
    """The prefix and its rows, as the kernel's arguments describe them.

    Args:
        num_tokens: tokens of all requests.
        prefix_len: keys of the prefix, at least 1.
        split_len: keys per split, a multiple of BLOCK_N and of the block size.
        num_heads: heads that have work items: query heads, or KV heads if a tile has the rows of
            all query heads that share one.
    """

    num_tokens: Any
    prefix_len: Any
    split_len: Any
    num_heads: Any


@gluon.jit
def count_items(prefix, TILE_TOKENS: gl.constexpr):
    """Return the number of work items."""
    query_tiles = (prefix.num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    splits = (prefix.prefix_len + prefix.split_len - 1) // prefix.split_len
    return query_tiles * splits * prefix.num_heads


@gluon.jit
def locate_item(prefix, item, config: gl.constexpr, TILE_TOKENS: gl.constexpr):
    """Return the `WorkItem` with a number.

    The query tiles of one head and split have neighbouring numbers, so that they read the same
    keys at the same time.
    """
    query_tiles = (prefix.num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    first_token = item % query_tiles * TILE_TOKENS
    head = item // query_tiles % prefix.num_heads
    split = item // query_tiles // prefix.num_heads
    num_keys = gl.minimum(
        prefix.split_len, prefix.prefix_len - split * prefix.split_len
    )
    return WorkItem(
        table_row=split,
        head=head,
        query_start=first_token,
        split=split,
        # seq_len - position is the number of tokens from the first one on
        position=num_keys - (prefix.num_tokens - first_token),
        seq_len=num_keys,
        kv_start=0,
        num_kv_tiles=(num_keys + config.BLOCK_N - 1) // config.BLOCK_N,
    )
