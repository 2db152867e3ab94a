"""Formats and register layouts of the Hopper decode kernel for caches of codes.

Each warp computes KEYS of a KV tile's keys by itself, so a tile has a dimension of warps. Products
are transposed, since their mma.m16n8k16 instructions have 16 rows and 8 columns, and a decode has
few queries: scores are [WARPS, KEYS, ROWS], with 8 or 16 query rows. A thread loads the bytes that
its own operands need from global memory to registers, as words of 4 or 8 codes.

Two renumberings make that possible. In K @ Q the elements of the head may be in any order that is
the same in K and Q. In V @ P the rows of the output may be in any order. So lane (g, t), with g
from 0 to 7 and t from 0 to 3, takes whole words of its rows. With SIZE words in a piece:

| operand | rows of the lane in a page | words of the lane in a row of W |
|---|---|---|
| K | g, g + 8 | t SIZE to t SIZE + SIZE - 1 of each 4 SIZE |
| V | 2 t, 2 t + 1, 2 t + 8, 2 t + 9 | W / 8 = SIZE words, from g SIZE on |

A piece is loaded by one instruction. If rows do not begin at multiples of 16 bytes, an instruction
loads fewer words, see `words_at_once`. Those that the lanes of a row load at once are consecutive
then too: lane t takes words t VEC to t VEC + VEC - 1 of each 4 VEC for K, and lane g of each 8 VEC
for V.

A page is 16 keys that are stored in one block. The instruction takes a lane's elements of K as
those numbered 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16, and a lane's elements of V as rows g of D /
8 products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....contract.cache_formats import FORMATS

PAGE = gl.constexpr(16)
"""Keys that are loaded by one entry of the block table."""
WARP_SIZE = gl.constexpr(32)


@gluon.constexpr_function
def has_slot_scales(name):
    """Return whether a format has a scale per token and head."""
    return FORMATS[name].has_token_scales


@gluon.constexpr_function
def codes_of_word(name):
    """Return the codes of a word of 4 bytes."""
    return 4 * FORMATS[name].codes_per_element


@gluon.constexpr_function
def has_levels(name):
    """Return whether codes are integers, whose keys are multiplied as levels from 0 on."""
    return FORMATS[name].has_levels


@gluon.constexpr_function
def words_shape(warps, pages, words, is_key):
    """Return the shape of the words of a tile, [PAGES, pieces, threads, words of a piece].

    A piece is up to 16 bytes of a row.

    Args:
        words: words of a row.
        is_key: whether they are keys. A thread then has pieces of two rows, else of four.
    """
    if is_key:
        return (pages, 2 * max(1, words // 16), 32 * warps, min(4, words // 4))
    return (pages, 4, 32 * warps, words // 8)


@gluon.constexpr_function
def words_at_once(size, alignment, is_key):
    """Return the words of a piece that one instruction loads.

    In pages that hold codes and scales, values begin 4 bytes after a multiple of 8 if keys begin at
    one.

    Args:
        size: words of a piece.
        alignment: bytes at whose multiples rows begin.
    """
    if alignment == 16:
        return size
    return min(size, alignment // 4) if is_key else 1


@gluon.constexpr_function
def words_layout(warps, shape):
    """Return the register layout of words of this shape."""
    pages, pieces, _, words = shape
    return gl.BlockedLayout(
        [pages, pieces, 1, words], [1, 1, 32, 1], [1, 1, warps, 1], [3, 2, 1, 0]
    )


@gluon.constexpr_function
def keys_layout(warps, keys):
    """Return the register layout of what each key has one of, [WARPS, KEYS]."""
    return gl.BlockedLayout([1, max(1, keys // 32)], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(warps):
    """Return the register layout of scores and accumulators, [WARPS, keys or columns, ROWS]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def rotation_layout(warps):
    """Return the register layout of rotated rows, [elements, ROWS]: each warp has elements."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


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
