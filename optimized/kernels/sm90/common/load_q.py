"""TMA loads of query tiles in the Hopper kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .config import WARPGROUP_M
from .gluon_names import async_load
from .storage import view_box
from .traits import count_rows, count_tokens


@gluon.jit
def load_q(shared, q, state, work, group_size, config: gl.constexpr):
    """Load the query tile of every consumer warpgroup.

    Rows without a token are not loaded: they have whatever the memory held. Heads past the last one
    of a group are loaded and not stored.

    Args:
        q: `TmaTensor`. Its boxes have rows and columns, or tokens, query heads and columns.
        group_size: query heads per head of a work item.
    """
    KEY_DIM: gl.constexpr = config.KEY_DIM
    TAIL_DIM: gl.constexpr = config.TAIL_DIM
    CONSUMERS: gl.constexpr = config.CONSUMERS
    HAS_HEADS: gl.constexpr = len(q.desc.block_type.shape) == 3
    # all columns, or 64
    COLUMNS: gl.constexpr = q.desc.block_type.shape[-1]
    shared.q_pipe.producer_acquire(state)
    full = shared.q_pipe.full_barrier(state)
    row = work.query_start + work.head * q.head_rows
    column = work.head * q.head_columns
    head = work.head * group_size
    USED_ROWS: gl.constexpr = count_rows(config)
    mbarrier.expect(full, CONSUMERS * USED_ROWS * (KEY_DIM + TAIL_DIM) * 2)
    for consumer in gl.static_range(CONSUMERS):
        tile = state.stage() * CONSUMERS + consumer
        token = work.query_start + consumer * count_tokens(config)
        tile_row = row + consumer * WARPGROUP_M
        for j in gl.static_range(KEY_DIM // COLUMNS):
            if HAS_HEADS:  # noqa: SIM108 (constexpr branches)
                start = [token, head, j * COLUMNS]
            else:
                start = [tile_row, column + j * COLUMNS]
            box = view_box(shared.q, q.desc, tile, j, config)
            async_load(q.desc, start, full, box)
        if TAIL_DIM > 0:
            if HAS_HEADS:  # noqa: SIM108 (constexpr branches)
                start = [token, head, KEY_DIM]
            else:
                start = [tile_row, column + KEY_DIM]
            box = view_box(shared.q_tail, q.desc, tile, 0, config)
            async_load(q.desc, start, full, box)
