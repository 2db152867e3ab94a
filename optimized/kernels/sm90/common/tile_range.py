"""KV tiles of a work item and of each consumer warpgroup: visible ones, and masked ones."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .traits import count_tokens, has_lower_bound, has_own_tiles


@gluon.jit
def _to_token(position, config: gl.constexpr):
    """Return the position of the token of a query row; negative before the first key.

    Args:
        position: a number, or [rows], in rows.
    """
    ROWS: gl.constexpr = config.ROWS_PER_TOKEN
    if ROWS == 1:
        return position
    else:  # noqa: RET505 (a constexpr branch)
        # a sum first, because division rounds toward 0 and not down
        return (position + ROWS) // ROWS - 1


@gluon.jit
def first_visible_key(position, config: gl.constexpr):
    """Return the first key that a query at `position` attends to.

    Args:
        position: a number, or [rows] of several queries. Negative before the first key.
    """
    position = _to_token(position, config)
    begin = position * 0
    if config.WINDOW > 0:
        begin = gl.maximum(begin, position - (config.WINDOW - 1))
    if config.CHUNK_SIZE > 0:
        begin = gl.maximum(begin, position // config.CHUNK_SIZE * config.CHUNK_SIZE)
    return begin


@gluon.jit
def end_of_visible_keys(position, config: gl.constexpr):
    """Return one more than the last key that a query at `position` may attend to.

    It may be past the sequence's end. Not for configs without an upper bound (`has_upper_bound`).

    Args:
        position: a number, or [rows] of several queries. Negative before the first key.
    """
    position = _to_token(position, config)
    if config.CAUSAL:
        return position + 1
    elif config.CHUNK_SIZE == 0:  # noqa: RET505 (constexpr branches)
        return position + config.WINDOW
    else:
        # a sum first, because division rounds toward 0 and not down
        end = (position + config.CHUNK_SIZE) // config.CHUNK_SIZE * config.CHUNK_SIZE
        if config.WINDOW > 0:
            end = gl.minimum(end, position + config.WINDOW)
        return end


@gluon.jit
def first_kv_tile(work, config: gl.constexpr):
    """Return the index of the first KV tile with a key that a work item attends to."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    tile = first_visible_key(work.position, config) // BLOCK_N
    if config.SPLIT_TILES > 0:
        tile = gl.maximum(tile, work.split * config.SPLIT_TILES)
    return tile


class OwnTiles(NamedTuple):
    """The KV tiles that a warpgroup computes, from the last to the first.

    Args:
        after: KV tiles of the work item after `last`.
        last, first: the last tile and the first one, counted from the sequence's begin.
        full_end, full_begin: tiles i with full_begin <= i < full_end need no mask. Tiles from
            full_end to `last` may need the first mask of `choose_masks`, those from `first` to
            full_begin the second.
        before: KV tiles of the work item before `first`.
    """

    after: Any
    last: Any
    full_end: Any
    full_begin: Any
    first: Any
    before: Any


@gluon.jit
def find_tiles(work, position, config: gl.constexpr):
    """Return the `OwnTiles` of a warpgroup.

    All warpgroups compute all KV tiles of the work item, unless `has_own_tiles`.

    Args:
        work: `WorkItem` with at least one KV tile.
        position: position of the warpgroup's first row.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    # without a mask for any row of the work item
    full_end = work.seq_len // BLOCK_N
    if config.CAUSAL:
        full_end = gl.maximum(end_of_visible_keys(work.position, config), 0) // BLOCK_N
    first = first_kv_tile(work, config)
    last = first + work.num_kv_tiles - 1
    full_begin = first
    after = 0
    before = 0
    # of this warpgroup's own rows
    last_row = position + count_tokens(config) - 1
    if has_own_tiles(config):
        own_last = (end_of_visible_keys(last_row, config) - 1) // BLOCK_N
        own_last = gl.minimum(gl.maximum(own_last, first), last)
        after = last - own_last
        last = own_last
        full_end = gl.maximum(end_of_visible_keys(position, config), 0) // BLOCK_N
    if has_lower_bound(config):
        own_first = gl.minimum(first_visible_key(position, config) // BLOCK_N, last)
        if config.SPLIT_TILES > 0:
            # the window may begin in an earlier split
            own_first = gl.maximum(own_first, first)
        before = own_first - first
        first = own_first
        full_begin = (first_visible_key(last_row, config) + BLOCK_N - 1) // BLOCK_N
        full_begin = gl.minimum(full_begin, last)
        full_end = gl.maximum(full_end, full_begin)
    full_end = gl.minimum(full_end, last)
    return OwnTiles(after, last, full_end, full_begin, first, before)
