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
from .traits import acc_columns, acc_layout, p_operand_layout, qk_layout, split_columns


class Operands(NamedTuple):
    """Tiles in shared memory that a consumer warpgroup multiplies.

    Args:
        q: [WARPGROUP_M, HEAD_DIM].
        q_tail: [WARPGROUP_M, TAIL_DIM]. Without TAIL_DIM it is `q`, and not used.
        k, v: [num_stages, BLOCK_N, HEAD_DIM].
        k_tail: [num_stages, BLOCK_N, TAIL_DIM]. Without TAIL_DIM it is `k`, and not used.
        q_tile: index of the query tile in shared memory.
    """

    q: Any
    q_tail: Any
    k: Any
    k_tail: Any
    v: Any
    q_tile: Any


@gluon.jit
def view_kv(shared, config: gl.constexpr):
    """Return `k`, `k_tail` and `v` of `Operands`: the stages as tiles, not as TMA boxes."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    TAIL_DIM: gl.constexpr = config.TAIL_DIM
    dtype: gl.constexpr = shared.q.dtype
    k = reinterpret(shared.k, dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    v_dtype: gl.constexpr = gl.bfloat16 if config.FITS_QUERIES else dtype
    v = reinterpret(shared.v, v_dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    k_tail = k
    if TAIL_DIM > 0:
        k_tail = reinterpret(
            shared.k_tail, dtype, [STAGES, BLOCK_N, TAIL_DIM], SWIZZLED
        )
    return k, k_tail, v


@gluon.jit
def select_tiles(shared, kv, q_state, config: gl.constexpr, CONSUMER: gl.constexpr):
    """Return the `Operands` of a warpgroup and work item.

    Args:
        kv: what `view_kv` returns.
        q_state: state of the work item's queries.
    """
    k, k_tail, v = kv
    q_tile = q_state.stage() * config.CONSUMERS + CONSUMER
    q = shared.q.index(q_tile)
    q_tail = q
    if config.TAIL_DIM > 0:
        q_tail = shared.q_tail.index(q_tile)
    return Operands(q, q_tail, k, k_tail, v, q_tile)


@gluon.jit
def issue_qk(tiles, kv_state, config: gl.constexpr):
    """Issue Q @ K^T of a stage.  # [WARPGROUP_M, BLOCK_N]"""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PARTS: gl.constexpr = split_columns(config.HEAD_SIZE)
    q = tiles.q
    k = tiles.k.index(kv_state.stage())  # [BLOCK_N, HEAD_DIM]
    qk = gl.zeros([WARPGROUP_M, BLOCK_N], gl.float32, qk_layout(BLOCK_N))
    if config.TAIL_DIM > 0:
        k_tail = tiles.k_tail.index(kv_state.stage())  # [BLOCK_N, TAIL_DIM]
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        return warpgroup_mma(tiles.q_tail, k_tail.permute((1, 0)), qk, is_async=True)
    elif len(PARTS) == 1:  # noqa: RET505 (constexpr branches)
        return warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
    else:
        for i in gl.static_range(len(PARTS)):
            qk = warpgroup_mma(
                q.slice(PARTS[i][0], PARTS[i][1], 1),
                k.slice(PARTS[i][0], PARTS[i][1], 1).permute((1, 0)),
                qk,
                use_acc=i > 0,
                is_async=True,
            )
        return qk


@gluon.jit
def issue_pv(tiles, p, acc, kv_state, config: gl.constexpr):
    """Issue acc + P @ V of a stage, part by part.  # [WARPGROUP_M, columns] each"""
    PARTS: gl.constexpr = acc_columns(config)
    v = tiles.v.index(kv_state.stage())  # [BLOCK_N, HEAD_DIM]
    if len(PARTS) == 1:
        return (warpgroup_mma(p, v, acc[0], is_async=True),)
    else:  # noqa: RET505 (a constexpr branch)
        parts = ()
        for i in gl.static_range(len(PARTS)):
            # the same registers
            p_of_part = gl.convert_layout(p, p_operand_layout(PARTS[i][1]))
            v_of_part = v.slice(PARTS[i][0], PARTS[i][1], 1)
            part = warpgroup_mma(p_of_part, v_of_part, acc[i], is_async=True)
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
        return parts


@gluon.jit
def wait_for_pv(acc, p):
    """Wait for all products, and return the accumulator's parts and p."""
    if len(acc) == 1:
        part, p = warpgroup_mma_wait(0, deps=[acc[0], p])
        return (part,), p
    else:  # noqa: RET505 (a constexpr branch)
        left, right, p = warpgroup_mma_wait(0, deps=[acc[0], acc[1], p])
        return (left, right), p


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
