"""TMA loads of query tiles in the Hopper kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .config import BOX_COLUMNS, SWIZZLED, SWIZZLED_3D, WARPGROUP_M
from .gluon_names import async_load, reinterpret
from .traits import box_rows, count_rows, count_tokens


@gluon.jit
def load_q(shared, q, state, work, group_size, config: gl.constexpr):
    """Load the query tile of every consumer warpgroup.

    Rows without a token are not loaded: they have whatever the memory held. Heads past the last one
    of a group are loaded and not stored.

    Args:
        q: `TmaTensor`. Its boxes have rows and columns, or tokens, query heads and columns.
        group_size: query heads per head of a work item.
    """
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    TAIL_DIM: gl.constexpr = config.TAIL_DIM
    CONSUMERS: gl.constexpr = config.CONSUMERS
    HAS_HEADS: gl.constexpr = len(q.desc.block_type.shape) == 3
    # all columns, or 64 of a tile whose columns are not a power of two
    COLUMNS: gl.constexpr = q.desc.block_type.shape[-1]
    BOXES: gl.constexpr = HEAD_DIM // COLUMNS
    STORED: gl.constexpr = shared.q.shape[0]
    ROWS: gl.constexpr = box_rows(config)
    tails = shared.q_tail
    if HAS_HEADS:
        box: gl.constexpr = [STORED * BOXES, ROWS[0], ROWS[1], COLUMNS]
        boxes = reinterpret(shared.q, q.desc.dtype, box, SWIZZLED_3D)
        if TAIL_DIM > 0:
            tail_box: gl.constexpr = [STORED, ROWS[0], ROWS[1], BOX_COLUMNS]
            tails = reinterpret(tails, q.desc.dtype, tail_box, SWIZZLED_3D)
    else:
        plain_box: gl.constexpr = [STORED * BOXES, WARPGROUP_M, COLUMNS]
        boxes = reinterpret(shared.q, q.desc.dtype, plain_box, SWIZZLED)
    shared.q_pipe.producer_acquire(state)
    full = shared.q_pipe.full_barrier(state)
    row = work.query_start + work.head * q.head_rows
    column = work.head * q.head_columns
    head = work.head * group_size
    USED_ROWS: gl.constexpr = count_rows(config)
    mbarrier.expect(full, CONSUMERS * USED_ROWS * (HEAD_DIM + TAIL_DIM) * 2)
    for consumer in gl.static_range(CONSUMERS):
        tile = state.stage() * CONSUMERS + consumer
        token = work.query_start + consumer * count_tokens(config)
        tile_row = row + consumer * WARPGROUP_M
        for j in gl.static_range(BOXES):
            if HAS_HEADS:  # noqa: SIM108 (constexpr branches)
                start = [token, head, j * COLUMNS]
            else:
                start = [tile_row, column + j * COLUMNS]
            async_load(q.desc, start, full, boxes.index(tile * BOXES + j))
        if TAIL_DIM > 0:
            if HAS_HEADS:  # noqa: SIM108 (constexpr branches)
                start = [token, head, HEAD_DIM]
            else:
                start = [tile_row, column + HEAD_DIM]
            async_load(q.desc, start, full, tails.index(tile))
