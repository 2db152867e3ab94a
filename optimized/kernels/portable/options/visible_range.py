"""Visible range: the keys that queries attend to, composed from all mask options.

A query attends to an interval of positions, which only moves forward from row to row. So the bounds
of a query tile come from its first and last row: keys outside all intervals are not read, and KV
tiles inside all of them need no mask. Trees and ranges add keys to the interval; they widen the
bounds, and have an element mask of their own.

A new mask is a file beside this one, and an entry in `MaskConstants` or `MaskArguments`. If it
limits the interval of a query, `limit_interval` calls it. If it does not, `find_visible_keys` and
`element_mask` do.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .....contract.attention_options import AttentionOptions
from . import causal, query_ranges, tree_mask
from .attention_chunk_size import limit_to_chunk
from .causal import limit_to_past, load_is_causal
from .query_ranges import load_ranges, range_element_mask, widen_to_ranges
from .sliding_window import limit_to_window
from .tree_mask import find_tree_keys, load_tree, tree_element_mask, widen_to_tree


class MaskConstants(NamedTuple):
    """Compile-time constants of the masks. 0 if a mask is absent.

    Args:
        CAUSAL: 0 or 1, or 2 for a flag per request.
        SLIDING_WINDOW, ATTENTION_CHUNK_SIZE: positions.
        HAS_LOWER_BOUND: whether the interval of some row begins after the first key.
    """

    CAUSAL: int
    SLIDING_WINDOW: int
    ATTENTION_CHUNK_SIZE: int
    HAS_LOWER_BOUND: bool


class MaskArguments(NamedTuple):
    """Arguments of the masks that stay as they are in launches of one plan. None if absent."""

    causal: causal.CausalFlags | None
    tree: tree_mask.TreeMask | None
    tree_depth: Tensor | None
    query_ranges: query_ranges.QueryRanges | None


def lower_masks(
    options: AttentionOptions, query_start_loc: Tensor
) -> tuple[MaskArguments, MaskConstants]:
    """Return what the masks are for the kernels of one plan."""
    # `choose_options` has replaced None by the operation's default
    causal_constant, causal_flags = causal.lower(options.causal)  # type: ignore[arg-type]
    arguments = MaskArguments(
        causal=causal_flags,
        tree=tree_mask.lower(options.tree_mask),
        tree_depth=tree_mask.lower_depth(
            options.tree_mask, bool(options.given_by_position), query_start_loc
        ),
        query_ranges=query_ranges.lower(options.query_ranges),
    )
    constants = MaskConstants(
        CAUSAL=causal_constant,
        SLIDING_WINDOW=options.sliding_window or 0,
        ATTENTION_CHUNK_SIZE=options.attention_chunk_size or 0,
        HAS_LOWER_BOUND=bool(options.sliding_window or options.attention_chunk_size),
    )
    return arguments, constants


class VisibleKeys(NamedTuple):
    """The keys that a query tile attends to.

    Args:
        position: [BLOCK_M] of each row in its sequence.
        row_begin, row_end: [BLOCK_M] interval of each row.
        begin, end: bounds of the keys that some row attends to.
        full_begin, full_end: bounds of the keys that every row attends to.
        tree: TreeTile; () without a tree mask.
        ranges: RangeTile; () without ranges.
    """

    position: Any
    row_begin: Any
    row_end: Any
    begin: Any
    end: Any
    full_begin: Any
    full_end: Any
    tree: Any
    ranges: Any


class KVTileKeys(NamedTuple):
    """The keys of a KV tile.

    Args:
        n: [BLOCK_N] indices in the sequence.
        is_key: [BLOCK_N] keys that some row attends to; () in a tile without masks.
        position: [BLOCK_N] indices too, except in a tree, where siblings share a position.
        of_tree: [BLOCK_N] keys that belong to the tree; () without a tree mask.
    """

    n: Any
    is_key: Any
    position: Any
    of_tree: Any


@triton.jit
def limit_interval(
    position, seq_len, is_causal, config: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return the first key that a query at `position` attends to, and the end of its interval.

    The causal mask ends an interval no later than windows and chunks do: they contain the query's
    own position. A mask that may end an interval before that position comes after the causal mask.
    """
    begin = position * 0
    end = begin + seq_len
    if config.masks.SLIDING_WINDOW > 0:
        begin, end = limit_to_window(begin, end, position, config.masks.SLIDING_WINDOW)
    if config.masks.ATTENTION_CHUNK_SIZE > 0:
        begin, end = limit_to_chunk(
            begin, end, position, config.masks.ATTENTION_CHUNK_SIZE
        )
    end = limit_to_past(end, position, seq_len, is_causal, CAUSAL)
    return begin, end


@triton.jit
def visible_range(position, seq_len, is_causal, config: tl.constexpr):
    """Return the interval of a query under the causal mask of the call."""
    return limit_interval(position, seq_len, is_causal, config, config.masks.CAUSAL)


@triton.jit
def find_visible_keys(call, req, rows, seq_len, config: tl.constexpr):
    """Return the keys that a query tile attends to.

    Token j of a request with q new tokens has position seq_len - q + j.

    Args:
        call: KernelCall.
        req: index of the request.
        rows: QueryRows of the tile.
    """
    masks = call.masks
    context = seq_len - rows.query_len
    position = context + rows.token  # [BLOCK_M]
    tree = ()
    if masks.tree is not None:
        tree, position = load_tree(
            masks.tree, masks.tree_depth, req, rows, context, position,
            call.tree_stride_req, call.tree_width,
        )  # fmt: skip
    is_causal = load_is_causal(masks.causal, req, True, config.masks.CAUSAL)
    row_begin, row_end = visible_range(position, seq_len, is_causal, config)
    first = context + rows.first_row // config.GROUP_SIZE
    last_token = (rows.first_row + config.BLOCK_M - 1) // config.GROUP_SIZE
    last = context + tl.minimum(last_token, rows.query_len - 1)
    begin, full_end = visible_range(first, seq_len, is_causal, config)
    full_begin, end = visible_range(last, seq_len, is_causal, config)
    if masks.tree is not None:
        # in a tree the mask replaces the causal order
        tree_begin, tree_end = limit_interval(position, seq_len, False, config, 0)
        row_begin = tl.where(tree.in_tree, tree_begin, row_begin)  # type: ignore[attr-defined]
        row_end = tl.where(tree.in_tree, tree_end, row_end)  # type: ignore[attr-defined]
        begin, end, full_begin, full_end = widen_to_tree(
            tree, rows, begin, end, full_begin, full_end, row_begin, seq_len
        )
    ranges = ()
    if masks.query_ranges is not None:
        ranges = load_ranges(masks.query_ranges, rows)
        begin, end = widen_to_ranges(ranges, begin, end, seq_len)
    return VisibleKeys(
        position, row_begin, row_end, begin, end, full_begin, full_end, tree, ranges
    )


@triton.jit
def full_tiles(visible, begin, end, BLOCK_N: tl.constexpr):
    """Return the bounds of the KV tiles between `begin` and `end` that every row attends to."""
    full_begin = tl.cdiv(visible.full_begin, BLOCK_N) * BLOCK_N
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
    full_end = tl.maximum(visible.full_end, 0) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(tl.minimum(full_end, end), full_begin)
    return full_begin, full_end


@triton.jit
def locate_keys(
    call, visible, start_n, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    HAS_LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    """Return the keys of the KV tile that begins at `start_n`."""
    n = start_n + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    is_key = ()
    if MASKED:
        is_key = n < visible.end
        if HAS_LOWER_BOUND:
            is_key &= n >= visible.begin
    position = n
    of_tree = ()
    if MASKED and call.masks.tree is not None:
        of_tree, position = find_tree_keys(
            call.masks.tree_depth, visible.tree, n, is_key
        )
    return KVTileKeys(n, is_key, position, of_tree)


@triton.jit
def element_mask(call, visible, keys, HAS_LOWER_BOUND: tl.constexpr):
    """Return which keys of a KV tile each row attends to: [BLOCK_M, BLOCK_N]."""
    mask = keys.position[None, :] < visible.row_end[:, None]
    if HAS_LOWER_BOUND:
        mask &= keys.position[None, :] >= visible.row_begin[:, None]
    tree = call.masks.tree
    if tree is not None:
        mask &= tree_element_mask(visible.tree, tree.stride_key, keys.n, keys.of_tree)
    if call.masks.query_ranges is not None:
        mask |= range_element_mask(visible.ranges, keys.position, keys.is_key)
    return mask
