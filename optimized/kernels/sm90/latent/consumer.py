"""Consumer warpgroups of the Hopper latent decode kernel: Q @ K, softmax and P @ V.

Both warpgroups have the same 64 query rows. Warpgroup 0 computes Q @ K of a KV tile and its
softmax, and writes p and alpha to shared memory. Each warpgroup multiplies p with its half of the
value columns. KV tiles are processed from the last to the first: tiles that need a mask come first.

P @ V of a tile follows its softmax at once, so its stage is released early. Q @ K of the next tile
before P @ V of this one, so that softmax and products overlap, took 6 to 9 % longer on six shapes
with 16 and 128 heads (H200, 2026-11-22).
Source: FlashMLA and FlashAttention-3 for the accumulator that two warpgroups share.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.config import SWIZZLED
from ..common.gluon_names import reinterpret
from ..common.pipeline import PipelineState
from ..common.softmax import online_softmax
from .config import (
    BLOCK_M,
    BLOCK_N,
    HALF,
    ROPE_DIM,
    STAGES,
    acc_layout,
    p_operand_layout,
    qk_layout,
)
from .epilogue import store_half, store_lse, store_no_split, store_split
from .items import visit_items
from .sync import (
    p_empty_arrive,
    p_empty_wait,
    p_full_arrive,
    p_full_wait,
    wait_for_part,
)


class LatentTiles(NamedTuple):
    """Tiles in shared memory that the consumers multiply.

    Args:
        q_0, q_1: [BLOCK_M, HALF]; q_rope: [BLOCK_M, ROPE_DIM].
        half_0, half_1: [STAGES, BLOCK_N, HALF]; rope: [STAGES, BLOCK_N, ROPE_DIM].
    """

    q_0: Any
    q_1: Any
    q_rope: Any
    half_0: Any
    half_1: Any
    rope: Any


class LatentCarry(NamedTuple):
    """Registers that warpgroup 0 carries from tile to tile.

    Args:
        acc: [BLOCK_M, HALF] P @ V of the tiles so far.
        m_i: [BLOCK_M] running maximum.
        l_i: [BLOCK_M, 4] running sum, one share per thread of a row.
    """

    acc: Any
    m_i: Any
    l_i: Any


@gluon.jit
def _view_tiles(shared):
    """Return the `LatentTiles` of what TMA fills as boxes."""
    dtype: gl.constexpr = shared.p.dtype
    return LatentTiles(
        reinterpret(shared.q_0, dtype, [BLOCK_M, HALF], SWIZZLED),
        reinterpret(shared.q_1, dtype, [BLOCK_M, HALF], SWIZZLED),
        reinterpret(shared.q_rope, dtype, [BLOCK_M, ROPE_DIM], SWIZZLED),
        reinterpret(shared.half_0, dtype, [STAGES, BLOCK_N, HALF], SWIZZLED),
        reinterpret(shared.half_1, dtype, [STAGES, BLOCK_N, HALF], SWIZZLED),
        reinterpret(shared.rope, dtype, [STAGES, BLOCK_N, ROPE_DIM], SWIZZLED),
    )


@gluon.jit
def consume_scores(shared, output, batch, segment, CAUSAL: gl.constexpr):
    """Run warpgroup 0: Q @ K, softmax, and P @ V of the first half of the value columns."""
    store_no_split(output, segment)
    states = PipelineState.start(STAGES), PipelineState.start(1)
    tiles = _view_tiles(shared)
    # an assignment would make a number of the constant
    visit_items(
        batch,
        segment,
        compute_scores,
        (shared, tiles, output, batch, segment, CAUSAL),
        states,
    )
    # consume the last arrival, so that the named barrier ends as it began
    p_empty_wait()


@gluon.jit
def compute_scores(item, args, states):
    """Compute and store what warpgroup 0 has of an item (`visit_items`)."""
    shared, tiles, output, batch, segment, _ = args
    CAUSAL: gl.constexpr = args[5]
    kv_state, q_state = states
    scale_log2 = output.scale_log2
    if (item.begin == 0) & (item.end < item.num_tiles):
        store_split(output, batch, segment, item)
    shared.q_pipe.consumer_wait(q_state)
    carry, kv_state = _mainloop(
        shared, tiles, batch, kv_state, item, scale_log2, CAUSAL
    )
    shared.q_pipe.consumer_release(q_state)
    inverse, lse = finish_softmax(carry, scale_log2)
    p_empty_wait()
    shared.alpha.store(inverse)
    p_full_arrive()
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, acc_layout())
    acc = carry.acc * gl.convert_layout(inverse, ACC_ROWS)[:, None]
    lse = gl.convert_layout(lse, ACC_ROWS)
    store_half(output, batch, segment, item, acc, 0)
    store_lse(output, batch, segment, item, lse)
    return kv_state, q_state.advance()


@gluon.jit
def consume_values(shared, output, batch, segment):
    """Run warpgroup 1: P @ V of the second half of the value columns."""
    p_empty_arrive()
    args = shared, _view_tiles(shared), output, batch, segment
    visit_items(batch, segment, compute_values, args, PipelineState.start(STAGES))


@gluon.jit
def compute_values(item, args, kv_state):
    """Compute and store what warpgroup 1 has of an item (`visit_items`)."""
    shared, tiles, output, batch, segment = args
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, acc_layout())
    acc = gl.zeros([BLOCK_M, HALF], gl.float32, acc_layout())
    for _ in range(item.end - item.begin):
        p_full_wait()
        alpha = shared.alpha.load(ACC_ROWS)
        wait_for_part(shared.pipe_1, kv_state)
        acc = acc * alpha[:, None]
        v = tiles.half_1.index(kv_state.stage())
        acc = warpgroup_mma(shared.p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        p_empty_arrive()
        shared.pipe_1.consumer_release(kv_state)
        kv_state = kv_state.advance()
    p_full_wait()
    inverse = shared.alpha.load(ACC_ROWS)
    acc = acc * inverse[:, None]
    p_empty_arrive()
    store_half(output, batch, segment, item, acc, 1)
    return kv_state


@gluon.jit
def _mainloop(shared, tiles, batch, kv_state, item, scale_log2, CAUSAL: gl.constexpr):
    """Return the `LatentCarry` after all KV tiles of an item, and the next KV state."""
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout())
    row = item.row_tile * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)  # [BLOCK_M]
    if CAUSAL:
        visible_end = item.context + row // batch.num_heads + 1
        visible_end = gl.minimum(visible_end, item.seq_len)
        visible_to_all = item.context + 1
    else:
        visible_end = row * 0 + item.seq_len
        visible_to_all = item.seq_len
    # the first tiles need no mask for any row
    num_unmasked = visible_to_all // BLOCK_N
    masked_begin = gl.minimum(gl.maximum(num_unmasked, item.begin), item.end - 1)
    carry, kv_state = _first_tile(
        shared, tiles, kv_state, item, visible_end, scale_log2
    )
    for i in range(item.end - 1 - masked_begin):
        carry, kv_state = _kv_iteration(
            shared, tiles, carry, kv_state, item.end - 2 - i, visible_end, scale_log2,
            True,
        )  # fmt: skip
    for i in range(masked_begin - item.begin):
        carry, kv_state = _kv_iteration(
            shared, tiles, carry, kv_state, masked_begin - 1 - i, visible_end, scale_log2,
            False,
        )  # fmt: skip
    return carry, kv_state


@gluon.jit
def _first_tile(shared, tiles, kv_state, item, visible_end, scale_log2):
    """Return the `LatentCarry` after an item's first KV tile, its last in the sequence."""
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout())
    acc = gl.zeros([BLOCK_M, HALF], gl.float32, acc_layout())
    m_i = gl.full([BLOCK_M], -float("inf"), gl.float32, ROWS)
    qk = _issue_qk(shared, tiles, kv_state)
    qk = warpgroup_mma_wait(0, deps=[qk])
    shared.pipe_1.consumer_release(kv_state)
    qk = mask_qk(qk, item.end - 1, visible_end)
    p, alpha, m_i, l_i = online_softmax(
        qk, m_i, 0, scale_log2, True, True, False, False, 2
    )
    p = publish_p(shared, p, alpha)
    acc = _multiply_pv(shared, tiles, p, acc, kv_state)
    return LatentCarry(acc, m_i, l_i), kv_state.advance()


@gluon.jit
def _kv_iteration(
    shared,
    tiles,
    carry,
    kv_state,
    kv_tile,
    visible_end,
    scale_log2,
    MASKED: gl.constexpr,
):
    """Compute Q @ K of a KV tile, its softmax and P @ V.

    Args:
        tiles: `LatentTiles`.
        carry: `LatentCarry`.
        kv_state: position of the tile.
        kv_tile: index of the tile in the sequence.
        visible_end: [BLOCK_M] end of each row's visible keys.
    """
    acc, m_i, l_i = carry
    qk = _issue_qk(shared, tiles, kv_state)  # [BLOCK_M, BLOCK_N]
    qk = warpgroup_mma_wait(0, deps=[qk])
    shared.pipe_1.consumer_release(kv_state)
    if MASKED:
        qk = mask_qk(qk, kv_tile, visible_end)
    p, alpha, m_i, l_i = online_softmax(
        qk, m_i, l_i, scale_log2, False, True, False, False, 2
    )
    p = publish_p(shared, p, alpha)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout()))[:, None]
    acc = _multiply_pv(shared, tiles, p, acc, kv_state)
    return LatentCarry(acc, m_i, l_i), kv_state.advance()


@gluon.jit
def _issue_qk(shared, tiles, kv_state):
    """Wait for a KV tile and issue Q @ K^T.  # [BLOCK_M, BLOCK_N]

    Half 0 comes last: its stage is the last to be loaded again.
    """
    stage = kv_state.stage()
    qk = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, qk_layout())
    wait_for_part(shared.pipe_1, kv_state)
    rope, half_1 = tiles.rope.index(stage), tiles.half_1.index(stage)
    qk = warpgroup_mma(
        tiles.q_rope, rope.permute((1, 0)), qk, use_acc=False, is_async=True
    )
    qk = warpgroup_mma(tiles.q_1, half_1.permute((1, 0)), qk, is_async=True)
    wait_for_part(shared.pipe_0, kv_state)
    half_0 = tiles.half_0.index(stage)
    return warpgroup_mma(tiles.q_0, half_0.permute((1, 0)), qk, is_async=True)


@gluon.jit
def _multiply_pv(shared, tiles, p, acc, kv_state):
    """Return acc + P @ V of the first half of a stage, which is released.  # [BLOCK_M, HALF]"""
    v = tiles.half_0.index(kv_state.stage())
    acc = warpgroup_mma(p, v, acc, is_async=True)
    # the registers of p are read until then
    acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
    shared.pipe_0.consumer_release(kv_state)
    return acc


@gluon.jit
def mask_qk(qk, kv_tile, visible_end):
    """Set the dot products with keys that are not visible to -inf."""
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, qk_layout()))  # [BLOCK_N]
    # relative to the tile, because then the columns are constants
    end = visible_end - kv_tile * BLOCK_N  # [BLOCK_M]
    return gl.where(column[None, :] < end[:, None], qk, -float("inf"))


@gluon.jit
def publish_p(shared, p, alpha):
    """Write p and alpha to shared memory for warpgroup 1, and return p as the left operand."""
    p = p.to(shared.p.dtype)
    p_empty_wait()
    shared.p.store(p)
    shared.alpha.store(alpha)
    # ordinary stores, before the tensor cores read through the async proxy
    fence_async_shared()
    p_full_arrive()
    return gl.convert_layout(p, p_operand_layout())


@gluon.jit
def finish_softmax(carry, scale_log2):
    """Return 1 / sum and the log-sum-exp in base 2.  # [BLOCK_M] each

    A row without a visible key has the sum 0. Its output is 0 and its log-sum-exp -inf.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout())
    total = gl.convert_layout(gl.sum(carry.l_i, 1), ROWS)
    total = gl.where(total > 0, total, 1.0)
    return 1.0 / total, carry.m_i * scale_log2 + gl.log2(total)
