"""Constants of the Hopper kernels: options, tile shape, pipeline depth, layouts in shared memory.

All figures are of an H200 with triton 3.6, bfloat16 and blocks of 16 tokens, unless they say
otherwise. "1 x 8,192" is one prompt of 8,192 tokens with 32 query heads and a causal mask.
"""

import math
from typing import NamedTuple

from triton.experimental.gluon import language as gl

WARPGROUP_M = gl.constexpr(64)
"""Query rows per consumer warpgroup: the M of one wgmma instruction."""
BOX_COLUMNS = gl.constexpr(64)
"""Elements per row of a TMA box of K or V: 128 bytes, the widest swizzle."""
SWIZZLE_ROWS = gl.constexpr(8)
"""Rows after which the 128-byte swizzle repeats, the fewest of a TMA box of K or V."""
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
        KEY_SIZE: head size of queries and keys.
        HEAD_SIZE: head size of values and outputs.
        KEY_DIM, TAIL_DIM: columns of the tiles of queries and keys, a power of two, and of a
            second tile with the columns after them, 64 or 0 (`pad_head_size`). TMA fills the
            columns from KEY_SIZE on with zeros. If the tensor map has no dimension of heads
            (`TmaTensor`), it fills them with the next head.
        HEAD_DIM, V_TAIL_DIM: the same of values and outputs. Columns from HEAD_SIZE on are not
            multiplied or not stored.
        BLOCK_SIZE: tokens per cache block, a multiple of SWIZZLE_ROWS; 0 without a block table.
        BLOCK_N: keys per KV tile (`choose_block_n`).
        STAGES: K tiles, and V tiles, in flight (`choose_stages`).
        CAUSAL: whether a query attends only to keys up to its own position.
        WINDOW: keys that a query attends to on each side, its own included: with CAUSAL the last
            ones. 0 without a window.
        CHUNK_SIZE: positions per attention chunk. 0 without chunks.
        SOFT_CAP: bound of the scores; 0 without a soft cap.
        FAST_TANH: whether the soft cap may have a relative error of 2 ** -11.
        GROUP: rows per token in a query tile, which are numbered token by token: the query heads
            of a KV head, for batch-invariant rows rounded up to a power of two. 1 if a query tile
            has one query head (`choose_group`). If it does not divide WARPGROUP_M, the last rows of
            a warpgroup have no token (`PackedPlan`).
        ROWS_PER_TOKEN: query rows per position. If more than 1, the rows of a request are the query
            heads of its only KV head, token by token, and a tile may begin within a token
            (`choose_rows_per_token`). Then query indices and positions of work items count rows,
            and GROUP is 1.
        CONSUMERS: consumer warpgroups (`choose_consumers`).
        SPLIT_TILES: KV tiles per split of batch-invariant rows; 0 if rows are not split.
        FITS_QUERIES: whether keys are float16, and queries, values and outputs bfloat16. Queries
            are fitted to float16 row by row. TMA moves all as float16: it keeps their bits.
        HAS_SEGMENTS: whether the KV tiles of a query tile may be divided among segments of several
            programs. Then a split has one KV tile.
        WHOLE_ACC: whether the accumulator has one part with all columns of a value's tile, as
            partial results and states have. Then V_TAIL_DIM is 0 (`with_whole_acc`).
    """

    KEY_SIZE: int
    HEAD_SIZE: int
    KEY_DIM: int
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
    V_TAIL_DIM: int = 0
    GROUP: int = 1
    ROWS_PER_TOKEN: int = 1
    CONSUMERS: int = 2
    SPLIT_TILES: int = 0
    FITS_QUERIES: bool = False
    HAS_SEGMENTS: bool = False
    WHOLE_ACC: bool = False


def pad_head_size(head_size: int) -> tuple[int, int]:
    """Return the columns of a head's tile, a power of two, and of a second tile after it.

    Example:
        80: 128 and 0. 160: 128 and 64, three boxes of 64 columns. 208: 256 and 0.
    """
    if 128 < head_size <= 192:
        return 128, BOX_COLUMNS.value
    return 64 if head_size <= 64 else 128 if head_size <= 128 else 256, 0


def with_whole_acc(config: Sm90Config) -> Sm90Config:
    """Return the constants of a kernel that stores its accumulators, which have one part.

    Values of 136 to 192 have tiles of 256 columns then. TMA reads no memory for those that a head
    does not have.
    """
    head_dim = 256 if config.V_TAIL_DIM else config.HEAD_DIM
    return config._replace(
        HEAD_DIM=head_dim,
        V_TAIL_DIM=0,
        CONSUMERS=choose_consumers(config.KEY_SIZE, config.HEAD_SIZE, True),
        STAGES=choose_stages(config.KEY_DIM, head_dim, 0, config.BLOCK_N),
        WHOLE_ACC=True,
    )


NARROW_TILE_KEYS = 1024
"""The longest window or chunk for which KV tiles of head size 64 have 64 keys.

A warpgroup's 64 rows attend to W + 63 keys of a window of W. Tiles of 128 keys add 127 keys on
average, tiles of 64 add 63. With tiles of 64 a window of 128 takes 199 us and not 332 (4 x 3,072
tokens, 64 query heads, sinks), one of 256 takes 227 and not 322, and one of 512 takes 413 and not
485 (1 x 16,384 tokens). Windows from 513 to 1,024 and chunks are not measured.
"""


def choose_block_n(
    key_dim: int, head_dim: int, v_tail_dim: int, window: int, chunk_size: int
) -> int:
    """Return the keys per KV tile.

    With 128, qk takes 64 registers per thread. At head size 256 the accumulator takes 128, and a
    tile of K and V takes 128 KiB of shared memory, so tiles have 64 keys. At head sizes from 136 to
    192 two stages of 128 keys would take 192 KiB, and the queries 48, of 227.

    Args:
        key_dim, head_dim, v_tail_dim, window, chunk_size: those of `Sm90Config`.
    """
    is_short = 0 < window <= NARROW_TILE_KEYS or 0 < chunk_size <= NARROW_TILE_KEYS
    is_small = key_dim == head_dim == 64
    is_large = 256 in (key_dim, head_dim) or v_tail_dim > 0
    return 64 if is_large or (is_small and is_short) else 128


def choose_stages(key_dim: int, head_dim: int, v_tail_dim: int, block_n: int) -> int:
    """Return the number of K tiles, and of V tiles, in flight.

    Three warpgroups that take turns (`uses_ping_pong`) hold a stage longer than two that do not.
    Tiles of half the size are computed in half the time, so more of them are in flight. Three
    stages of 64 keys of head size 192 take 144 KiB, and the queries 48.

    Args:
        key_dim, head_dim, v_tail_dim, block_n: those of `Sm90Config`.
    """
    if key_dim == head_dim == 64:
        return 3 if block_n == 128 else 5
    return 3 if v_tail_dim and key_dim < 256 else 2


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


def choose_rows_per_token(group_size: int) -> int:
    """Return the query rows per token of tiles that may begin within a token, or 1 without them.

    They are for one KV head with many query heads: a tile has nearly the same keys for all of its
    rows, and only a request's last tile has rows without a token. The tiles of `choose_group` and
    `PackedPlan` are whole tokens, which are few or leave rows unused if a group has more than half
    of the rows of a warpgroup.

    Args:
        group_size: query heads of the only KV head.

    Example:
        71 heads: 192 rows begin with the last 20 heads of a token and end with the first 30 of
        another.
    """
    is_whole = WARPGROUP_M.value % group_size == 0
    return 1 if is_whole or 2 * group_size <= WARPGROUP_M.value else group_size


def choose_consumers(key_size: int, head_size: int, is_whole: bool) -> int:
    """Return the number of consumer warpgroups, each with WARPGROUP_M rows.

    With a head size of 64 a third warpgroup fits: 1,276 us with three and 1,393 us with two for
    1 x 8,192 in an early version of the kernel. Up to 96 it fits if an accumulator has no padded
    columns. With 96 and 32 KV heads, 2,048 on 16,384 takes 759 us with three and 800 with two,
    64 x 300 347 and 366; with 8 KV heads 1 x 8,192 takes 725 and 796. The case that loses is
    8 x 1,024, whose last query tile is a third full: 201 us with three and 181 with two.

    Args:
        key_size, head_size: of keys and of values. With keys of more than 128 and values of more
            than 64, three query tiles do not fit into shared memory.
        is_whole: whether the accumulator has padded columns (`Sm90Config.WHOLE_ACC`).
    """
    return 3 if head_size <= (64 if is_whole or key_size > 128 else 96) else 2
