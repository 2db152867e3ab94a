"""Shared memory of the Hopper kernels: query tiles, stages of KV tiles, work items, mbarriers."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from .config import (
    BOX_COLUMNS,
    LINEAR,
    SWIZZLED,
    SWIZZLED_3D,
    WARP_SIZE,
    WARPGROUP_M,
    WORK_STAGES,
)
from .gluon_names import reinterpret
from .pipeline import MbarrierRing, allocate_barriers
from .traits import box_rows, count_q_stages
from .work_item import WORK_FIELDS


class SharedStorage(NamedTuple):
    """Shared memory that the warps of a program have in common.

    Args:
        q: [query stages * consumers, WARPGROUP_M, HEAD_DIM] query tiles. A finished output tile
            overwrites its query tile, and is stored from there.
        q_tail: [query stages * consumers, WARPGROUP_M, TAIL_DIM] the queries' columns after
            HEAD_DIM. Without TAIL_DIM it is `q`, and not used.
        k, v: [boxes, box rows, BOX_COLUMNS] the stages of the KV tiles, as TMA fills them.
        k_tail: the same of the keys' columns after HEAD_DIM. Without TAIL_DIM it is `k`.
        work: [WORK_STAGES, 32 * WORK_FIELDS] the published work items, one copy per lane.
        q_pipe: one stage per query tile of a warpgroup.
        k_pipe: one stage per K tile. Its empty barrier i covers K tile i and V tile i - 1, so
            that consumers arrive once per iteration.
        v_pipe: one stage per V tile, with the empty barriers of `k_pipe`. One full barrier more,
            the last, is for the loads of a tile whose last rows must be cleared.
        work_pipe: WORK_STAGES stages, one per work item.
        never: [1, 1] no warp arrives at this barrier.
    """

    q: Any
    q_tail: Any
    k: Any
    k_tail: Any
    v: Any
    work: Any
    q_pipe: Any
    k_pipe: Any
    v_pipe: Any
    work_pipe: Any
    never: Any


@gluon.jit
def packed_q(shared, config: gl.constexpr):
    """Return the query tiles in the shape of TMA boxes of tokens, query heads and columns.

    Returns:
        [query stages * consumers, tokens, GROUP, HEAD_DIM], the same memory as `shared.q`. If GROUP
        does not divide WARPGROUP_M, tokens and heads are those of `box_rows`.
    """
    TILES: gl.constexpr = shared.q.shape[0]
    ROWS: gl.constexpr = box_rows(config)
    boxes: gl.constexpr = [TILES, ROWS[0], ROWS[1], config.HEAD_DIM]
    return reinterpret(shared.q, shared.q.dtype, boxes, SWIZZLED_3D)


@gluon.jit
def allocate(k_desc, v_desc, config: gl.constexpr):
    """Return the `SharedStorage` of a program, with its barriers initialized.

    Args:
        k_desc, v_desc: tensor maps of keys and values.
    """
    dtype: gl.constexpr = k_desc.dtype
    k_box_rows: gl.constexpr = k_desc.block_type.shape[0]
    v_box_rows: gl.constexpr = v_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    Q_STAGES: gl.constexpr = count_q_stages(config)
    COLUMN_BOXES: gl.constexpr = HEAD_DIM // BOX_COLUMNS
    K_BOXES: gl.constexpr = STAGES * (BLOCK_N // k_box_rows) * COLUMN_BOXES
    V_BOXES: gl.constexpr = STAGES * (BLOCK_N // v_box_rows) * COLUMN_BOXES
    q = gl.allocate_shared_memory(
        dtype, [Q_STAGES * config.CONSUMERS, WARPGROUP_M, HEAD_DIM], SWIZZLED
    )
    k = gl.allocate_shared_memory(dtype, [K_BOXES, k_box_rows, BOX_COLUMNS], SWIZZLED)
    v = gl.allocate_shared_memory(dtype, [V_BOXES, v_box_rows, BOX_COLUMNS], SWIZZLED)
    # not None without TAIL_DIM: triton 3.6 does not return a tuple with None
    q_tail = q
    k_tail = k
    if config.TAIL_DIM > 0:
        # one box per row of boxes
        gl.static_assert(config.TAIL_DIM == BOX_COLUMNS)
        q_tail = gl.allocate_shared_memory(
            dtype, [Q_STAGES * config.CONSUMERS, WARPGROUP_M, BOX_COLUMNS], SWIZZLED
        )
        k_tail = gl.allocate_shared_memory(
            dtype, [K_BOXES // COLUMN_BOXES, k_box_rows, BOX_COLUMNS], SWIZZLED
        )
    work = gl.allocate_shared_memory(
        gl.int32, [WORK_STAGES, WARP_SIZE * WORK_FIELDS], LINEAR
    )
    q_pipe = MbarrierRing(allocate_barriers(Q_STAGES), allocate_barriers(Q_STAGES))
    k_pipe = MbarrierRing(allocate_barriers(STAGES), allocate_barriers(STAGES))
    v_pipe = MbarrierRing(allocate_barriers(STAGES + 1), k_pipe.empty)
    work_pipe = MbarrierRing(
        allocate_barriers(WORK_STAGES), allocate_barriers(WORK_STAGES)
    )
    never = allocate_barriers(1)
    # Full and empty barriers alternate, and the two rings share a loop, because triton 3.6
    # synchronizes the CTA between two writes to one array.
    gl.static_assert(Q_STAGES <= WORK_STAGES)
    for i in gl.static_range(WORK_STAGES):
        if i < Q_STAGES:
            q_pipe.init_stage(i, config.CONSUMERS)
        # read by the consumers and by the warp that loads V
        work_pipe.init_stage(i, config.CONSUMERS + 1)
    for i in gl.static_range(STAGES):
        k_pipe.init_stage(i, config.CONSUMERS)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(v_pipe.full.index(i), count=1)
    mbarrier.init(never.index(0), count=1)
    fence_async_shared()
    return SharedStorage(
        q, q_tail, k, k_tail, v, work, q_pipe, k_pipe, v_pipe, work_pipe, never
    )
