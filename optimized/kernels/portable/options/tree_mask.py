"""Tree mask: a draft token attends to its ancestors and to all keys before the tree."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class TreeMask(NamedTuple):
    """The trees of a batch.

    Args:
        mask: [reqs, tree, tree] uint8. 1 if new token i attends to new token j.
        stride_query, stride_key: of `mask`.
    """

    mask: Any
    stride_query: Any
    stride_key: Any


class TreeTile(NamedTuple):
    """The tree of one query tile.

    Args:
        is_tree: whether this request has a tree: no more new tokens than the mask has.
        in_tree: [BLOCK_M] rows of the tree.
        mask: [BLOCK_M] pointers to each row's entries.
        depth: pointer to the depth of the request's first token; () without depths.
        context: position of the first new token.
    """

    is_tree: Any
    in_tree: Any
    mask: Any
    depth: Any
    context: Any


def lower(tree_mask: Tensor | None) -> TreeMask | None:
    """Return the trees as an argument of the kernels."""
    if tree_mask is None:
        return None
    return TreeMask(tree_mask.view(torch.uint8), *tree_mask.stride()[1:])


def lower_depth(
    tree_mask: Tensor | None, needs_positions: bool, query_start_loc: Tensor
) -> Tensor | None:
    """Return the depth of each token of the trees, if an option depends on positions.

    Returns:
        [reqs, tree] int32 ancestors of each token. The context length plus the depth is the
        position. It is not a field of TreeMask, since triton 3.6 does not take None there.
    """
    if tree_mask is None or not needs_positions:
        return None
    # mask entries past a request's own tokens may have any value
    own = torch.arange(tree_mask.shape[2], device=tree_mask.device)
    own = own < query_start_loc.diff()[:, None]
    return (tree_mask & own[:, None, :]).sum(2, dtype=torch.int32) - 1


@triton.jit
def load_tree(tree, depth, req, rows, context, position, tree_stride_req, tree_width):
    """Return a query tile's tree, and its positions with the depth of each token."""
    is_tree = rows.query_len <= tree_width
    mask = tree.mask + tl.cast(req, tl.int64) * tree_stride_req
    in_tree = rows.is_row & is_tree
    # [BLOCK_M]
    mask += tl.where(in_tree, rows.token, 0).to(tl.int64) * tree.stride_query
    depths = ()
    if depth is not None:
        # siblings have the same position: the number of their ancestors is their depth
        depths = depth + req * tree_width
        own_depth = tl.load(depths + rows.token, mask=in_tree, other=0)
        position = tl.where(in_tree, context + own_depth, position)
    tile = TreeTile(is_tree, in_tree, mask, depths, context)
    return tile, position


@triton.jit
def widen_to_tree(tile, rows, begin, end, full_begin, full_end, row_begin, seq_len):
    """Return a query tile's bounds with all keys of its tree.

    Positions need not increase from row to row in a tree, so the bounds come from all rows. No
    key of the tree is visible to every row.
    """
    if tile.is_tree:
        lowest = tl.min(tl.where(rows.is_row, row_begin, seq_len), 0)
        begin = tl.minimum(lowest, tile.context)
        full_begin = tl.max(tl.where(rows.is_row, row_begin, 0), 0)
        full_end = tile.context
        end = seq_len
    return begin, end, full_begin, full_end


@triton.jit
def find_tree_keys(depth, tile, n, is_key):
    """Return which keys of a KV tile belong to the tree, and the positions of all of them.

    Args:
        depth: as of `lower_depth`.
        tile: TreeTile.
        n: [BLOCK_N] indices of the keys in the sequence.
        is_key: [BLOCK_N] keys that are loaded.
    """
    new = n - tile.context
    of_tree = (new >= 0) & is_key & tile.is_tree
    key_position = n
    if depth is not None:
        own_depth = tl.load(tile.depth + new, mask=of_tree, other=0)
        key_position = tl.where(of_tree, tile.context + own_depth, n)
    return of_tree, key_position


@triton.jit
def tree_element_mask(tile, stride_key, n, of_tree):
    """Return which keys of a KV tile the tree leaves visible: [BLOCK_M, BLOCK_N]."""
    new = n - tile.context
    is_ancestor = tl.load(
        tile.mask[:, None] + (new * stride_key)[None, :],
        mask=of_tree[None, :],
        other=1,
    )
    return is_ancestor != 0
