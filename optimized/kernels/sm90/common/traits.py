"""What follows from an `Sm90Config` at compile time: rows, masks, overlap, registers, layouts.

All figures are of an H200 with triton 3.6, as in `config.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import BOX_COLUMNS, WARPGROUP_M


@gluon.constexpr_function
def has_lower_bound(config):
    """Return whether a query's first visible key depends on its position."""
    return config.WINDOW > 0 or config.CHUNK_SIZE > 0


@gluon.constexpr_function
def has_upper_bound(config):
    """Return whether the end of a query's visible keys depends on its position."""
    return config.CAUSAL or config.WINDOW > 0 or config.CHUNK_SIZE > 0


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

    One tile may need both if a window is shorter than a warpgroup's tokens and a KV tile. A window
    to both sides has its begin and its end twice as far apart. If it has the keys of a tile, its
    begin is not in the tile with the sequence's end either.
    """
    both = MASK_END.value + MASK_BEGIN.value
    shortest = config.BLOCK_N
    if config.CAUSAL:
        shortest += WARPGROUP_M.value // config.GROUP
    if config.CHUNK_SIZE or 0 < config.WINDOW < shortest:
        return both, both
    if config.WINDOW and config.SPLIT_TILES:
        # the first tile of any split may be at the window's begin
        return both, both
    return MASK_END.value, MASK_BEGIN.value


@gluon.constexpr_function
def split_columns(size):
    """Return columns as (first, size) of parts whose sizes are powers of two, 16 at least.

    A product over columns takes 16 at once.

    Example:
        88: 64 columns, 16, and 16 of which the last 8 are padding.
    """
    parts, first = [], 0
    while first < size:
        columns = max(16, 1 << ((size - first).bit_length() - 1))
        parts.append((first, columns))
        first += columns
    return tuple(parts)


@gluon.constexpr_function
def key_columns(config, is_tail):
    """Return the columns of the tile of queries and keys, or of its tail, as (first, size)."""
    if is_tail:
        return split_columns(config.KEY_SIZE - config.KEY_DIM)
    return split_columns(min(config.KEY_SIZE, config.KEY_DIM))


@gluon.constexpr_function
def acc_columns(config):
    """Return the columns of the accumulator's parts as (first, size).

    Columns that are not stored take registers and products, so a head is whole boxes of 64 columns,
    and one part of 16, 32 or 64 columns after them.

    Example:
        80: 64 and 16. 112: 128. 160: 128 and 32. 208: 128, 64 and 16.
    """
    if config.WHOLE_ACC:
        return ((0, config.HEAD_DIM),)
    boxes, rest = divmod(config.HEAD_SIZE, BOX_COLUMNS.value)
    rest = 1 << max(rest - 1, 15).bit_length() if rest else 0
    if rest == BOX_COLUMNS.value:
        boxes, rest = boxes + 1, 0
    parts = split_columns(boxes * BOX_COLUMNS.value)
    return (*parts, (boxes * BOX_COLUMNS.value, rest)) if rest else parts


@gluon.constexpr_function
def q_columns(config):
    """Return the columns of a query tile, which the output tile overwrites, and of its tail."""
    tail = max(config.TAIL_DIM, config.V_TAIL_DIM)
    return max(config.KEY_DIM, config.HEAD_DIM), tail


@gluon.constexpr_function
def has_padded_columns(config):
    """Return whether a value's tiles have columns that the head does not have."""
    return config.HEAD_SIZE < config.HEAD_DIM + config.V_TAIL_DIM


@gluon.constexpr_function
def clears_padding(config):
    """Return whether producer warp 1 may clear the rows of no request.

    With keys of 192 and values of 128 this code would change the schedule of the consumers' main
    loop (triton 3.6).
    """
    return (config.KEY_SIZE, config.HEAD_SIZE) != (192, 128)


@gluon.constexpr_function
def has_row_scales(config):
    """Return whether each row of dot products has a scale of its own in the softmax.

    A soft cap has applied it before.
    """
    return config.FITS_QUERIES and config.SOFT_CAP == 0


@gluon.constexpr_function
def count_q_stages(config):
    """Return the query tiles per warpgroup.

    With two, the next work item's is loaded while this one's output is stored. At head sizes above
    128, and with more stages, there is shared memory for one: 224 KiB hold 114,688 elements.
    """
    columns = config.KEY_DIM + config.TAIL_DIM + config.HEAD_DIM + config.V_TAIL_DIM
    kv_elements = config.STAGES * config.BLOCK_N * columns
    # those of `q_columns`, which triton 3.6 would give a tuple without names
    in_tile = max(config.KEY_DIM, config.HEAD_DIM)
    in_tile += max(config.TAIL_DIM, config.V_TAIL_DIM)
    q_elements = config.CONSUMERS * WARPGROUP_M.value * in_tile
    return 1 if kv_elements > 65536 or kv_elements + 2 * q_elements > 114688 else 2


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
