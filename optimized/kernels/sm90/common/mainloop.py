"""Mainloop of a consumer warpgroup of the Hopper kernels over the KV tiles of a work item.

One iteration of the mainloop issues Q @ K of a KV tile and P @ V of the tile before, so that the
softmax of one overlaps with the products of the other. KV tiles are processed from the last to the
first: tiles that need a mask come first, then the rest in a loop without masks.

Head sizes overlap differently, and `choose_consumers` selects the way:
- Values of head sizes above 96, two warpgroups: the softmax runs between the issue of P @ V and
  the wait for it. p stays in float32 until Q @ K of the next tile is issued, where rounding it
  costs no time.
- Head sizes up to 64, three warpgroups with 160 registers per thread: one warpgroup's softmax
  overlaps with the products of the others, which a ping-pong order enforces. p is rounded at once
  and carried as packed 16-bit pairs, because 64 registers of float32 would spill.
- Head sizes from 72 to 96, three warpgroups too. Q @ K follows after P @ V is complete, because the
  registers do not hold both results.
The accumulator of most padded heads has several parts (`acc_columns`), because a tile's columns are
a power of two.
Source: FlashAttention-3 (Shah et al. 2024) for both kinds of overlap.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from .config import WARPGROUP_M
from .mma import issue_pv, issue_qk, wait_for_pv
from .pipeline import ping_pong_arrive, ping_pong_wait, release_previous_q
from .score import load_factors, modify_scores, softmax_scale
from .softmax import mask_qk, online_softmax, pack_p, rescale, round_p, unpack_p
from .traits import (
    acc_columns,
    choose_masks,
    has_lower_bound,
    has_row_scales,
    packs_p,
    qk_layout,
    uses_ping_pong,
    uses_polynomial,
    waits_for_pv,
)


class Carry(NamedTuple):
    """Registers that the mainloop carries from iteration to iteration.

    Args:
        acc: [WARPGROUP_M, columns] P @ V of the tiles before the last, in parts (`acc_columns`).
        p: [WARPGROUP_M, BLOCK_N] weights of the last tile; packed with ping-pong.
        alpha: [WARPGROUP_M] by which `acc` must still be multiplied; with ping-pong it has been.
        m_i: [WARPGROUP_M] running maximum.
        l_i: [WARPGROUP_M, 4] running sum, one share per thread of a row.
    """

    acc: Any
    p: Any
    alpha: Any
    m_i: Any
    l_i: Any


@gluon.jit
def attend_to_tiles(
    shared,
    tiles,
    acc,
    kv_state,
    q_state,
    work,
    own,
    position,
    scale_log2,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
    factors=None,
):
    """Return the `Carry` after some KV tiles of a work item, and the next KV state.

    Args:
        tiles: `Operands`.
        acc: [WARPGROUP_M, columns] zeros of each part of `acc_columns`.
        own: `OwnTiles`.
        position: position of the warpgroup's first row.
        scale_log2: the scale of dot products times log2(e); [WARPGROUP_M] with FITS_QUERIES.
        factors: Optional. Pointer to a factor of each key of the sequence. If None, they are 1.
    """
    MASKS: gl.constexpr = choose_masks(config)
    p, alpha, m_i, l_i = _first_tile(
        shared, tiles, kv_state, q_state, work, own.last, position, scale_log2,
        MASKS[0], config, factors,
    )  # fmt: skip
    kv_state = kv_state.advance()
    carry = Carry(acc, p, alpha, m_i, l_i)
    for i in range(own.last - own.full_end):
        carry = _kv_iteration(
            shared, tiles, carry, kv_state,
            own.last - 1 - i, position, work.seq_len, scale_log2,
            config, MASKS[0], CONSUMER, factors,
        )  # fmt: skip
        kv_state = kv_state.advance()
    for i in range(own.full_end - own.full_begin):
        carry = _kv_iteration(
            shared, tiles, carry, kv_state,
            own.full_end - 1 - i, position, work.seq_len, scale_log2,
            config, 0, CONSUMER, factors,
        )  # fmt: skip
        kv_state = kv_state.advance()
    if has_lower_bound(config):
        for i in range(own.full_begin - own.first):
            carry = _kv_iteration(
                shared, tiles, carry, kv_state,
                own.full_begin - 1 - i, position, work.seq_len, scale_log2,
                config, MASKS[1], CONSUMER, factors,
            )  # fmt: skip
            kv_state = kv_state.advance()
    carry = _last_pv(shared, tiles, carry, kv_state, config)
    return carry, kv_state


@gluon.jit
def _first_tile(
    shared,
    tiles,
    kv_state,
    q_state,
    work,
    kv_tile,
    position,
    scale_log2,
    MASKS: gl.constexpr,
    config: gl.constexpr,
    factors,
):
    """Return p, alpha, m_i and l_i of a work item's first KV tile, its last in the sequence."""
    shared.q_pipe.consumer_wait(q_state)
    shared.k_pipe.consumer_wait(kv_state)
    qk = issue_qk(tiles, kv_state, config)
    qk = warpgroup_mma_wait(0, deps=[qk])
    shared.k_pipe.consumer_release(kv_state)
    if config.SPLIT_TILES == 0:
        release_previous_q(shared, q_state, config)
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout(config.BLOCK_N))
    m_i = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ROWS)
    # not before the wait: there would be no registers for them
    of_keys = load_factors(factors, kv_tile, config)
    qk = modify_scores(qk, scale_log2, of_keys, config)
    qk = mask_qk(qk, kv_tile, position, work.seq_len, MASKS, config)
    scale = softmax_scale(scale_log2, config)
    p, alpha, m_i, l_i = online_softmax(
        qk, m_i, 0, scale, True, True, False, config.SPLIT_TILES > 0,
        HAS_ROW_SCALES=has_row_scales(config),
    )  # fmt: skip
    if packs_p(config):
        p = pack_p(p, tiles.v.dtype)
    return p, alpha, m_i, l_i


@gluon.jit
def _kv_iteration(
    shared,
    tiles,
    carry,
    kv_state,
    kv_tile,
    position,
    seq_len,
    scale_log2,
    config: gl.constexpr,
    MASKS: gl.constexpr,
    CONSUMER: gl.constexpr,
    factors,
):
    """Issue Q @ K of a KV tile and P @ V of the tile before, and return the next `Carry`.

    Args:
        tiles: `Operands`.
        carry: `Carry`.
        kv_state: position of the K tile; the V tile of `carry.p` is at the position before.
        kv_tile: index of the KV tile in the sequence.
        position: position of the warpgroup's first row.
        MASKS: MASK_END, MASK_BEGIN, or their sum; 0 if all rows attend to all keys of the tile.
    """
    MASKED: gl.constexpr = MASKS > 0
    COLUMNS: gl.constexpr = acc_columns(config)[0][1]
    PING_PONG: gl.constexpr = uses_ping_pong(config)
    PV_FIRST: gl.constexpr = waits_for_pv(config)
    PACKED: gl.constexpr = packs_p(config)
    dtype: gl.constexpr = tiles.v.dtype
    acc, p, alpha, m_i, l_i = carry
    if PV_FIRST:
        qk, acc = _pv_and_qk(shared, tiles, acc, p, kv_state, config, CONSUMER)
    else:
        # issue Q @ K of this tile
        shared.k_pipe.consumer_wait(kv_state)
        if PING_PONG:
            ping_pong_wait(CONSUMER)
        qk = issue_qk(tiles, kv_state, config)  # [WARPGROUP_M, BLOCK_N]
        # issue P @ V of the tile before
        shared.v_pipe.consumer_wait(kv_state.previous())
        if PACKED:
            p = unpack_p(p, dtype, COLUMNS)
        else:
            acc = rescale(acc, alpha)
            p = round_p(p, dtype, COLUMNS)
        acc = issue_pv(tiles, p, acc, kv_state.previous(), config)
        # softmax of this tile, while P @ V is in flight
        qk = warpgroup_mma_wait(len(acc), deps=[qk])
        if PING_PONG:
            ping_pong_arrive((CONSUMER + 1) % config.CONSUMERS)
    # not before the wait: there would be no registers for them
    of_keys = load_factors(factors, kv_tile, config)
    qk = modify_scores(qk, scale_log2, of_keys, config)
    if MASKED:
        qk = mask_qk(qk, kv_tile, position, seq_len, MASKS, config)
    POLYNOMIAL: gl.constexpr = uses_polynomial(config, MASKED)
    p_next, alpha, m_i, l_i = online_softmax(
        qk, m_i, l_i, softmax_scale(scale_log2, config),
        False, MASKED, POLYNOMIAL, config.SPLIT_TILES > 0,
        HAS_ROW_SCALES=has_row_scales(config),
    )  # fmt: skip
    # wait for P @ V, and release K of this tile with V of the tile before
    if not PING_PONG:
        # This wait is over at once, but it begins a basic block. Without it ptxas moves the wait
        # for P @ V before the softmax, and nothing overlaps: 4 % slower at head size 128 (912 to
        # 948 us). With ping-pong, where the warpgroups overlap, it costs 6 %.
        mbarrier.wait(shared.never.index(0), 1)
    if not PV_FIRST:
        acc, p = wait_for_pv(acc, p)
        shared.k_pipe.consumer_release(kv_state)
    if PACKED:
        acc = rescale(acc, alpha)
        p_next = pack_p(p_next, dtype)
    return Carry(acc, p_next, alpha, m_i, l_i)


@gluon.jit
def _pv_and_qk(
    shared,
    tiles,
    acc,
    p,
    kv_state,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Return Q @ K of a KV tile, and acc with P @ V of the tile before, one after the other.

    The result of Q @ K takes the registers of p.

    Args:
        p: packed weights of the tile before.
        kv_state: position of the K tile.
    """
    dtype: gl.constexpr = tiles.v.dtype
    shared.v_pipe.consumer_wait(kv_state.previous())
    shared.k_pipe.consumer_wait(kv_state)
    if uses_ping_pong(config):
        ping_pong_wait(CONSUMER)
    p = unpack_p(p, dtype, acc_columns(config)[0][1])
    acc = issue_pv(tiles, p, acc, kv_state.previous(), config)
    acc, p = wait_for_pv(acc, p)
    qk = issue_qk(tiles, kv_state, config)  # [WARPGROUP_M, BLOCK_N]
    if uses_ping_pong(config):
        # the next warpgroup's P @ V follows this product without a gap
        ping_pong_arrive((CONSUMER + 1) % config.CONSUMERS)
    qk = warpgroup_mma_wait(0, deps=[qk])
    shared.k_pipe.consumer_release(kv_state)
    return qk, acc


@gluon.jit
def _last_pv(shared, tiles, carry, kv_state, config: gl.constexpr):
    """Return the `Carry` after P @ V of the work item's last tile.

    The next work item's first K tile releases this V tile.
    """
    COLUMNS: gl.constexpr = acc_columns(config)[0][1]
    dtype: gl.constexpr = tiles.v.dtype
    acc, p, alpha, m_i, l_i = carry
    if packs_p(config):
        p = unpack_p(p, dtype, COLUMNS)
    else:
        acc = rescale(acc, alpha)
        p = round_p(p, dtype, COLUMNS)
    shared.v_pipe.consumer_wait(kv_state.previous())
    acc = issue_pv(tiles, p, acc, kv_state.previous(), config)
    acc, p = wait_for_pv(acc, p)
    return Carry(acc, p, alpha, m_i, l_i)
