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
from .traits import box_rows, count_q_stages, q_columns
from .work_item import WORK_FIELDS


class SharedStorage(NamedTuple):
    """Shared memory that the warps of a program have in common.

    Args:
        q: [query stages * consumers, WARPGROUP_M, columns] query tiles. A finished output tile
            overwrites its query tile, and is stored from there (`q_columns`).
        q_tail: [query stages * consumers, WARPGROUP_M, BOX_COLUMNS] the columns of the tails of
            queries and outputs. Without tails it is `q`, and not used.
        k, v: [boxes, box rows, BOX_COLUMNS] the stages of the KV tiles, as TMA fills them.
        k_tail, v_tail: the same of the tails. Without TAIL_DIM or V_TAIL_DIM they are `k` or `v`.
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
    v_tail: Any
    work: Any
    q_pipe: Any
    k_pipe: Any
    v_pipe: Any
    work_pipe: Any
    never: Any


@gluon.jit
def view_output(shared, q_tile, config: gl.constexpr):
    """Return the memory of a query tile as the output tile's.  # [WARPGROUP_M, HEAD_DIM]"""
    TILES: gl.constexpr = q_columns(config)[0] // config.HEAD_DIM
    if TILES == 1:
        return shared.q.index(q_tile)
    else:  # noqa: RET505 (a constexpr branch)
        shape: gl.constexpr = [shared.q.shape[0] * TILES, WARPGROUP_M, config.HEAD_DIM]
        tiles = reinterpret(shared.q, shared.q.dtype, shape, SWIZZLED)
        return tiles.index(q_tile * TILES)


@gluon.jit
def view_box(tiles, desc, tile, j, config: gl.constexpr):
    """Return where a TMA box of a query or output tile is stored.

    Args:
        tiles: `SharedStorage.q` or `q_tail`.
        desc: the tensor map. Its boxes have rows and columns, or tokens, query heads and columns.
        tile: index of the query tile.
        j: index of the box in the tile.
    """
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    BOXES: gl.constexpr = tiles.shape[2] // COLUMNS
    STORED: gl.constexpr = tiles.shape[0] * BOXES
    if len(desc.block_type.shape) == 3:
        ROWS: gl.constexpr = box_rows(config)
        packed: gl.constexpr = [STORED, ROWS[0], ROWS[1], COLUMNS]
        boxes = reinterpret(tiles, desc.dtype, packed, SWIZZLED_3D)
    else:
        plain: gl.constexpr = [STORED, WARPGROUP_M, COLUMNS]
        boxes = reinterpret(tiles, desc.dtype, plain, SWIZZLED)
    return boxes.index(tile * BOXES + j)


@gluon.jit
def allocate(k_desc, v_desc, config: gl.constexpr):
    """Return the `SharedStorage` of a program, with its barriers initialized.

    Args:
        k_desc, v_desc: tensor maps of keys and values.
    """
    dtype: gl.constexpr = k_desc.dtype
    k_box_rows: gl.constexpr = k_desc.block_type.shape[0]
    v_box_rows: gl.constexpr = v_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    Q_STAGES: gl.constexpr = count_q_stages(config)
    Q_TILES: gl.constexpr = Q_STAGES * config.CONSUMERS
    Q_COLUMNS: gl.constexpr = q_columns(config)
    K_ROWS: gl.constexpr = STAGES * (BLOCK_N // k_box_rows)
    V_ROWS: gl.constexpr = STAGES * (BLOCK_N // v_box_rows)
    q = gl.allocate_shared_memory(dtype, [Q_TILES, WARPGROUP_M, Q_COLUMNS[0]], SWIZZLED)
    k = _allocate_boxes(dtype, K_ROWS * (config.KEY_DIM // BOX_COLUMNS), k_box_rows)
    v = _allocate_boxes(dtype, V_ROWS * (config.HEAD_DIM // BOX_COLUMNS), v_box_rows)
    # not None without tails: triton 3.6 does not return a tuple with None
    q_tail = q
    k_tail = k
    v_tail = v
    if Q_COLUMNS[1] > 0:
        # one box per tile
        gl.static_assert(Q_COLUMNS[1] == BOX_COLUMNS)
        q_tail = _allocate_boxes(dtype, Q_TILES, WARPGROUP_M)
    if config.TAIL_DIM > 0:
        k_tail = _allocate_boxes(dtype, K_ROWS, k_box_rows)
    if config.V_TAIL_DIM > 0:
        v_tail = _allocate_boxes(dtype, V_ROWS, v_box_rows)
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
        q, q_tail, k, k_tail, v, v_tail, work, q_pipe, k_pipe, v_pipe, work_pipe, never
    )


@gluon.jit
def _allocate_boxes(dtype: gl.constexpr, BOXES: gl.constexpr, ROWS: gl.constexpr):
    """Return shared memory of boxes of 64 columns.  # [BOXES, ROWS, BOX_COLUMNS]"""
    return gl.allocate_shared_memory(dtype, [BOXES, ROWS, BOX_COLUMNS], SWIZZLED)
