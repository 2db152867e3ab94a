"""Constants of the Hopper prefill kernel: options, tile shape, pipeline depth, registers, layouts.

All figures are of an H200 with triton 3.6, bfloat16 and blocks of 16 tokens, unless they say
otherwise. "1 x 8,192" is one prompt of 8,192 tokens with 32 query heads and a causal mask.
"""

import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPGROUP_M = gl.constexpr(64)
"""Query rows per consumer warpgroup: the M of one wgmma instruction."""
BOX_COLUMNS = gl.constexpr(64)
"""Elements per row of a TMA box of K or V: 128 bytes, the widest swizzle."""
SWIZZLE_ROWS = gl.constexpr(8)
"""Rows after which the 128-byte swizzle repeats."""
WORK_STAGES = gl.constexpr(2)
"""Published work items: the next one is published while this one is computed."""
MAX_CONSUMERS = gl.constexpr(3)
"""The largest `choose_consumers`."""
WARP_SIZE = gl.constexpr(32)
LN_2 = gl.constexpr(math.log(2.0))
LOG2_E = gl.constexpr(math.log2(math.e))

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
"""Shared-memory layout of all tiles: 16-bit elements, 128-byte swizzle."""
SWIZZLED_32_BIT = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
"""The same bytes seen as 32-bit words."""
SWIZZLED_3D = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
"""The same bytes as tokens, query heads and columns."""
LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
"""Shared-memory layout of a vector."""


class Sm90Config(NamedTuple):
    """Compile-time constants of a launch plan. An option that is off generates no code.

    Args:
        HEAD_SIZE: head size of values and outputs, and of queries and keys without TAIL_DIM.
        HEAD_DIM: columns of their tiles, a power of two (`pad_head_size`). TMA fills the columns
            from HEAD_SIZE on with the next head or zeros. They are not multiplied or not stored.
        BLOCK_SIZE: tokens per cache block, a multiple of 16; 0 without a block table.
        BLOCK_N: keys per KV tile (`choose_block_n`).
        STAGES: K tiles, and V tiles, in flight (`choose_stages`).
        CAUSAL: whether a query attends only to keys up to its own position.
        WINDOW: last keys that a query attends to, its own included. 0 without a window. A window
            requires CAUSAL.
        CHUNK_SIZE: positions per attention chunk. 0 without chunks. Chunks require CAUSAL.
        SOFT_CAP: bound of the scores; 0 without a soft cap.
        FAST_TANH: whether the soft cap may have a relative error of 2 ** -11.
        TAIL_DIM: columns of queries and keys after HEAD_DIM, which values do not have: 64 for
            queries and keys of head size 192 and values of 128. They have tiles of their own,
            because a tile's columns are a power of two.
        GROUP: rows per token in a query tile, which are numbered token by token: the query heads
            of a KV head, for batch-invariant rows rounded up to a power of two. 1 if a query tile
            has one query head (`choose_group`). If it does not divide WARPGROUP_M, the last rows of
            a warpgroup have no token (`PackedPlan`).
        CONSUMERS: consumer warpgroups (`choose_consumers`).
        SPLIT_TILES: KV tiles per split of batch-invariant rows; 0 if rows are not split.
        HAS_SEGMENTS: whether the KV tiles of a query tile may be divided among segments of several
            programs. Then a split has one KV tile.
    """

    HEAD_SIZE: int
    HEAD_DIM: int
    BLOCK_SIZE: int
    BLOCK_N: int
    STAGES: int
    CAUSAL: bool
    WINDOW: int = 0
    CHUNK_SIZE: int = 0
    SOFT_CAP: float = 0.0
    FAST_TANH: bool = False
    TAIL_DIM: int = 0
    GROUP: int = 1
    CONSUMERS: int = 2
    SPLIT_TILES: int = 0
    HAS_SEGMENTS: bool = False


def pad_head_size(head_size: int) -> int:
    """Return the columns of a head's tiles."""
    return 64 if head_size <= 64 else 128 if head_size <= 128 else 256


NARROW_TILE_KEYS = 1024
"""The longest window or chunk for which KV tiles of head size 64 have 64 keys.

A warpgroup's 64 rows attend to W + 63 keys of a window of W. Tiles of 128 keys add 127 keys on
average, tiles of 64 add 63. With tiles of 64 a window of 128 takes 199 us and not 332 (4 x 3,072
tokens, 64 query heads, sinks), one of 256 takes 227 and not 322, and one of 512 takes 413 and not
485 (1 x 16,384 tokens). Windows from 513 to 1,024 and chunks are not measured.
"""


def choose_block_n(head_dim: int, window: int, chunk_size: int) -> int:
    """Return the keys per KV tile.

    With 128, qk takes 64 registers per thread. At head size 256 the accumulator takes 128, and a
    tile of K and V takes 128 KiB of shared memory, so tiles have 64 keys.

    Args:
        head_dim: columns of a head's tiles.
        window, chunk_size: those of `Sm90Config`; 0 without.
    """
    is_short = 0 < window <= NARROW_TILE_KEYS or 0 < chunk_size <= NARROW_TILE_KEYS
    return 64 if head_dim == 256 or (head_dim == 64 and is_short) else 128


def choose_stages(head_dim: int, block_n: int) -> int:
    """Return the number of K tiles, and of V tiles, in flight.

    Three warpgroups that take turns (`uses_ping_pong`) hold a stage longer than two that do not.
    Tiles of half the size are computed in half the time, so more of them are in flight.
    """
    if head_dim == 64:
        return 3 if block_n == 128 else 5
    return 2


def choose_group(group_size: int) -> int:
    """Return the query heads in a query tile: all that share a KV head, or one.

    Groups that do not divide WARPGROUP_M have a second plan for short requests (`PackedPlan`).

    With all of them, the last tile of a short prompt has fewer rows without a token: 48 prompts of
    30 to 700 tokens take 243 us and not 281, 200 of 60 tokens 135 and not 262. Long prompts take
    the same time (1 x 8,192: 827 and 826 us), or less: at head size 64 1,101 us and not 1,139, and
    4 x 2,048 at head size 256 233 us and not 242. The one case that lost is 4 x 3,072 with a window
    of 256 and sinks at head size 64: 236 us and not 230.

    Args:
        group_size: query heads per KV head.
    """
    return group_size if WARPGROUP_M.value % group_size == 0 else 1


def choose_consumers(head_size: int, is_invariant: bool) -> int:
    """Return the number of consumer warpgroups, each with WARPGROUP_M rows.

    With a head size of 64 a third warpgroup fits: 1,276 us with three and 1,393 us with two for
    1 x 8,192 in an early version of the kernel. Up to 96 it fits if an accumulator has no padded
    columns. With 96 and 32 KV heads, 2,048 on 16,384 takes 759 us with three and 800 with two,
    64 x 300 347 and 366; with 8 KV heads 1 x 8,192 takes 725 and 796. The case that loses is
    8 x 1,024, whose last query tile is a third full: 201 us with three and 181 with two.

    Args:
        head_size: of the values.
        is_invariant: whether rows are batch-invariant. Their accumulator has padded columns.
    """
    return 3 if head_size <= (64 if is_invariant else 96) else 2


@gluon.constexpr_function
def has_lower_bound(config):
    """Return whether a query's first visible key depends on its position."""
    return config.WINDOW > 0 or config.CHUNK_SIZE > 0


@gluon.constexpr_function
def has_own_tiles(config):
    """Return whether the warpgroups of a work item attend to different KV tiles.

    Three warpgroups of 64 tokens each have rows up to 128 positions apart, a whole KV tile. The
    first ones skip the last tiles.
    """
    if config.WINDOW > 0 or config.CHUNK_SIZE > 0:
        return True
    return config.CAUSAL and config.CONSUMERS == 3 and config.GROUP == 1


@gluon.constexpr_function
def count_tokens(config):
    """Return the tokens in the WARPGROUP_M rows of a consumer warpgroup."""
    return WARPGROUP_M.value // config.GROUP


@gluon.constexpr_function
def count_rows(config):
    """Return the rows of a consumer warpgroup that have a token: 60 of 64 for groups of 5."""
    return WARPGROUP_M.value // config.GROUP * config.GROUP


@gluon.constexpr_function
def has_unused_rows(config):
    """Return whether the last rows of a consumer warpgroup have no token."""
    return WARPGROUP_M.value % config.GROUP != 0


@gluon.constexpr_function
def box_rows(config):
    """Return the tokens and query heads of a TMA box of queries, as Triton's types declare it.

    Sizes of these types are powers of two. With rows that have no token, the tensor map has fewer
    tokens and other heads, and as many rows of the tile are not written (`PackedPlan`).
    """
    if WARPGROUP_M.value % config.GROUP:
        return WARPGROUP_M.value // 8, 8
    return WARPGROUP_M.value // config.GROUP, config.GROUP


MASK_END = gl.constexpr(1)
"""Mask keys after the last visible one: the sequence's end, or the query's own position."""
MASK_BEGIN = gl.constexpr(2)
"""Mask keys before the first visible one: the begin of a window or chunk."""


@gluon.constexpr_function
def choose_masks(config):
    """Return the masks of KV tiles at the end of the visible range, and of those at its begin.

    One tile may need both if a window is shorter than a warpgroup's tokens and a KV tile.
    """
    both = MASK_END.value + MASK_BEGIN.value
    shortest = WARPGROUP_M.value // config.GROUP + config.BLOCK_N
    if config.CHUNK_SIZE or 0 < config.WINDOW < shortest:
        return both, both
    if config.WINDOW and config.SPLIT_TILES:
        # the first tile of any split may be at the window's begin
        return both, both
    return MASK_END.value, MASK_BEGIN.value


@gluon.constexpr_function
def split_columns(head_size):
    """Return a head's columns as (first, size) of parts whose sizes are powers of two."""
    parts, first = [], 0
    while first < head_size:
        size = 1 << ((head_size - first).bit_length() - 1)
        parts.append((first, size))
        first += size
    return tuple(parts)


@gluon.constexpr_function
def acc_columns(config):
    """Return the columns of the accumulator's parts as (first, size).

    Three warpgroups have no registers for columns that are not stored.
    """
    if config.CONSUMERS == 3:
        return split_columns(config.HEAD_SIZE)
    return ((0, config.HEAD_DIM),)


@gluon.constexpr_function
def count_q_stages(config):
    """Return the query tiles per warpgroup.

    With two, the next work item's is loaded while this one's output is stored. At head size 256,
    with TAIL_DIM, and with more stages, there is shared memory for one.
    """
    kv_elements = config.STAGES * config.BLOCK_N * config.HEAD_DIM
    return 1 if config.HEAD_DIM == 256 or config.TAIL_DIM or kv_elements > 32768 else 2


@gluon.constexpr_function
def uses_ping_pong(config):
    """Return whether the consumer warpgroups take turns at the tensor cores.

    Without turns, three warpgroups start together: all want the tensor cores first and the
    exponential units afterwards. Turns and a third stage save 3.6 % of the time of 1 x 8,192, and
    8 % of 32 x 1,500 tokens without a mask. The two warpgroups of head size 128 lose 6 % by it:
    each of them has the registers to overlap its own softmax with its own P @ V.
    """
    return config.CONSUMERS == 3


@gluon.constexpr_function
def packs_p(config):
    """Return whether p is rounded at once and carried in pairs, for lack of registers."""
    return config.CONSUMERS == 3


@gluon.constexpr_function
def waits_for_pv(config):
    """Return whether P @ V is complete before Q @ K of the next tile is issued.

    With three warpgroups and an accumulator of more than 64 columns, the registers do not hold the
    results of both.
    """
    return config.CONSUMERS == 3 and config.HEAD_SIZE > 64


@gluon.constexpr_function
def uses_polynomial(config, masked):
    """Return whether a polynomial computes one exponential in eight of a KV tile.

    Batch-invariant rows round alike in tiles with and without a mask. In a short row, whose keys
    are all in a tile with a mask, the error may exceed the log-sum-exp's budget. One of
    degree 5 (error 1.5e-7) in all their tiles gains nothing: 8 x 2,048 takes 552 us with it and 543
    without, 2,048 on 30,720 1,884 and 1,892.

    Args:
        masked: whether the tile has a mask.
    """
    return config.CONSUMERS < 3 and not masked and config.SPLIT_TILES == 0


@gluon.constexpr_function
def consumer_registers(config):
    """Return the registers per thread of the consumer warpgroups after the first.

    The first warpgroup gets what is left, which is at least as much. At head size 64, 152 for
    consumers and 40 for producers is 45 % slower than 160 and 24.
    """
    return 160 if config.CONSUMERS == 3 else 240


PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers per thread of a producer warp: the fewest that setmaxnreg allows."""


@gluon.constexpr_function
def qk_layout(block_n):
    """Return the register layout of qk and p of a warpgroup, [WARPGROUP_M, BLOCK_N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])


@gluon.constexpr_function
def acc_layout(head_dim):
    """Return the register layout of a warpgroup's accumulator, [WARPGROUP_M, HEAD_DIM]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])


@gluon.constexpr_function
def p_operand_layout(head_dim):
    """Return the register layout of p as the left operand of P @ V."""
    return gl.DotOperandLayout(0, acc_layout(head_dim), k_width=2)


@gluon.constexpr_function
def warp_layout(num_warps):
    """Return the register layout of a vector of 32 elements, one per lane of a warp."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])
