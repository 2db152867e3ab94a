"""Register layouts of the Hopper FP8 decode kernel.

Each warp computes KEYS of a KV tile's keys by itself, so a tile has a dimension of warps: scores
are [WARPS, BLOCK_M, KEYS]. The products are mma.m16n8k16 instructions. A thread loads the bytes
that its own operands need from global memory to registers.

Two renumberings make that possible. In Q @ K the elements of the head may be in any order that is
the same in Q and K. In P @ V the columns of the output may be in any order. So lane (g, t), with g
from 0 to 7 and t from 0 to 3, takes whole words of 4 elements:

| operand | rows of the lane in a page | words of the lane in a row |
|---|---|---|
| K | g, g + 8 | 4 t to 4 t + 3 of each 16 |
| V | 2 t, 2 t + 1, 2 t + 8, 2 t + 9 | D / 32 words, from g D / 32 on |

A page is 16 keys that are stored in one block. The instruction takes a lane's elements of K as
those numbered 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16, and a lane's elements of V as column g of
D / 8 products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PAGE = gl.constexpr(16)
"""Keys that are loaded by one entry of the block table."""
WARP_SIZE = gl.constexpr(32)


@gluon.constexpr_function
def words_shape(warps, pages, words, is_key):
    """Return the shape of the words of a tile, [PAGES, pieces, threads, words of a piece].

    A piece is what a thread loads at once: 16 bytes, or 8 of values with head size 64.

    Args:
        words: words of a row.
        is_key: whether they are keys. A thread then has pieces of two rows, else of four.
    """
    if is_key:
        return (pages, words // 8, 32 * warps, 4)
    return (pages, 4, 32 * warps, words // 8)


@gluon.constexpr_function
def words_layout(warps, shape):
    """Return the register layout of words of this shape."""
    pages, pieces, _, words = shape
    return gl.BlockedLayout(
        [pages, pieces, 1, words], [1, 1, 32, 1], [1, 1, warps, 1], [3, 2, 1, 0]
    )


@gluon.constexpr_function
def product_layout(warps):
    """Return the register layout of scores and accumulators, [WARPS, BLOCK_M, columns]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def rows_layout(warps):
    """Return the register layout of finished rows, [BLOCK_M, BLOCK_DV]."""
    return gl.BlockedLayout([1, 4], [2, 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def partials_layout(warps, rows):
    """Return the register layout of partial results, [splits, rows, BLOCK_DV]."""
    of_rows = min(warps, rows)
    return gl.BlockedLayout(
        [1, 1, 4], [1, 2, 16], [1, of_rows, warps // of_rows], [2, 1, 0]
    )


@gluon.constexpr_function
def requests_layout(warps, reqs):
    """Return the register layout of requests whose tiles are counted: each warp has all of them."""
    return gl.BlockedLayout([max(1, reqs // 32)], [32], [warps], [0])
