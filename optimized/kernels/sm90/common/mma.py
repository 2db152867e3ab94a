"""Matrix products of the Hopper prefill kernel: their operands, and wgmma of Q @ K and P @ V.

The accumulator may have several parts, because the columns of a tile are a power of two.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .config import SWIZZLED, WARPGROUP_M
from .gluon_names import reinterpret
from .traits import (
    acc_columns,
    acc_layout,
    key_columns,
    p_operand_layout,
    qk_layout,
)


class Operands(NamedTuple):
    """Tiles in shared memory that a consumer warpgroup multiplies.

    Without TAIL_DIM `q_tail` is `q` and `k_tail` is `k`, without V_TAIL_DIM `v_tail` is `v`, and
    they are not used.

    Args:
        q: [WARPGROUP_M, columns], of which KEY_DIM are of queries.
        q_tail: [WARPGROUP_M, TAIL_DIM].
        k: [num_stages, BLOCK_N, KEY_DIM].
        k_tail: [num_stages, BLOCK_N, TAIL_DIM].
        v: [num_stages, BLOCK_N, HEAD_DIM].
        v_tail: [num_stages, BLOCK_N, V_TAIL_DIM].
        q_tile: index of the query tile in shared memory.
    """

    q: Any
    q_tail: Any
    k: Any
    k_tail: Any
    v: Any
    v_tail: Any
    q_tile: Any


@gluon.jit
def view_kv(shared, config: gl.constexpr):
    """Return `k` to `v_tail` of `Operands`: the stages as tiles, not as TMA boxes."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = shared.q.dtype
    k = reinterpret(shared.k, dtype, [STAGES, BLOCK_N, config.KEY_DIM], SWIZZLED)
    v_dtype: gl.constexpr = gl.bfloat16 if config.FITS_QUERIES else dtype
    v = reinterpret(shared.v, v_dtype, [STAGES, BLOCK_N, config.HEAD_DIM], SWIZZLED)
    k_tail = k
    v_tail = v
    if config.TAIL_DIM > 0:
        shape: gl.constexpr = [STAGES, BLOCK_N, config.TAIL_DIM]
        k_tail = reinterpret(shared.k_tail, dtype, shape, SWIZZLED)
    if config.V_TAIL_DIM > 0:
        v_shape: gl.constexpr = [STAGES, BLOCK_N, config.V_TAIL_DIM]
        v_tail = reinterpret(shared.v_tail, v_dtype, v_shape, SWIZZLED)
    return k, k_tail, v, v_tail


@gluon.jit
def select_tiles(shared, kv, q_state, config: gl.constexpr, CONSUMER: gl.constexpr):
    """Return the `Operands` of a warpgroup and work item.

    Args:
        kv: what `view_kv` returns.
        q_state: state of the work item's queries.
    """
    k, k_tail, v, v_tail = kv
    q_tile = q_state.stage() * config.CONSUMERS + CONSUMER
    q = shared.q.index(q_tile)
    q_tail = q
    if config.TAIL_DIM > 0:
        q_tail = shared.q_tail.index(q_tile)
    return Operands(q, q_tail, k, k_tail, v, v_tail, q_tile)


@gluon.jit
def issue_qk(tiles, kv_state, config: gl.constexpr):
    """Issue Q @ K^T of a stage.  # [WARPGROUP_M, BLOCK_N]"""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    qk = gl.zeros([WARPGROUP_M, BLOCK_N], gl.float32, qk_layout(BLOCK_N))
    k = tiles.k.index(kv_state.stage())  # [BLOCK_N, KEY_DIM]
    qk = _multiply_columns(tiles.q, k, qk, config, False)
    if config.TAIL_DIM > 0:
        k_tail = tiles.k_tail.index(kv_state.stage())  # [BLOCK_N, TAIL_DIM]
        qk = _multiply_columns(tiles.q_tail, k_tail, qk, config, True)
    return qk


@gluon.jit
def _multiply_columns(q, k, qk, config: gl.constexpr, IS_TAIL: gl.constexpr):
    """Issue Q @ K^T over the columns of a tile, or qk + Q @ K^T over those of its tail.

    Args:
        q, k: [WARPGROUP_M, columns], [BLOCK_N, columns].
    """
    PARTS: gl.constexpr = key_columns(config, IS_TAIL)
    for i in gl.static_range(len(PARTS)):
        qk = warpgroup_mma(
            select_columns(q, PARTS[i][0], PARTS[i][1]),
            select_columns(k, PARTS[i][0], PARTS[i][1]).permute((1, 0)),
            qk,
            use_acc=IS_TAIL or i > 0,
            is_async=True,
        )
    return qk


@gluon.jit
def select_columns(tile, FIRST: gl.constexpr, SIZE: gl.constexpr):
    """Return columns of a tile in shared memory."""
    if tile.shape[1] == SIZE:
        return tile
    else:  # noqa: RET505 (a constexpr branch)
        return tile.slice(FIRST, SIZE, 1)


@gluon.jit
def issue_pv(tiles, p, acc, kv_state, config: gl.constexpr):
    """Issue acc + P @ V of a stage, part by part.  # [WARPGROUP_M, columns] each"""
    PARTS: gl.constexpr = acc_columns(config)
    v = tiles.v.index(kv_state.stage())  # [BLOCK_N, HEAD_DIM]
    parts = ()
    for i in gl.static_range(len(PARTS)):
        if PARTS[i][0] < config.HEAD_DIM:
            v_of_part = select_columns(v, PARTS[i][0], PARTS[i][1])
        else:
            v_tail = tiles.v_tail.index(kv_state.stage())  # [BLOCK_N, V_TAIL_DIM]
            v_of_part = select_columns(v_tail, 0, PARTS[i][1])
        # the same registers
        p_of_part = gl.convert_layout(p, p_operand_layout(PARTS[i][1]))
        part = warpgroup_mma(p_of_part, v_of_part, acc[i], is_async=True)
        parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@gluon.jit
def wait_for_pv(acc, p):
    """Wait for all products, and return the accumulator's parts and p."""
    if len(acc) == 1:
        part, p = warpgroup_mma_wait(0, deps=[acc[0], p])
        return (part,), p
    elif len(acc) == 2:  # noqa: RET505 (constexpr branches)
        first, second, p = warpgroup_mma_wait(0, deps=[acc[0], acc[1], p])
        return (first, second), p
    else:
        first, second, third, p = warpgroup_mma_wait(
            0, deps=[acc[0], acc[1], acc[2], p]
        )
        return (first, second, third), p


@gluon.jit
def number_columns(FIRST: gl.constexpr, SIZE: gl.constexpr):
    """Return the indices of the columns of one of the accumulator's parts.  # [SIZE]"""
    layout: gl.constexpr = acc_layout(SIZE)
    return FIRST + gl.arange(0, SIZE, gl.SliceLayout(0, layout))


@gluon.jit
def clear_acc(config: gl.constexpr):
    """Return zeros for the parts of `acc_columns`.  # [WARPGROUP_M, columns] each"""
    PARTS: gl.constexpr = acc_columns(config)
    acc = ()
    for i in gl.static_range(len(PARTS)):
        acc = acc + (_clear_part(PARTS[i][1]),)  # type: ignore[assignment]  # noqa: RUF005
    return acc


@gluon.jit
def _clear_part(COLUMNS: gl.constexpr):
    return gl.zeros([WARPGROUP_M, COLUMNS], gl.float32, acc_layout(COLUMNS))
