"""Copying producer of the Hopper latent decode kernel, for caches that no TMA box reads.

A box does not cross a cache block, so blocks of one slot would need a box per row and 64 columns.
The four warps of this role copy such blocks row by row, 16 bytes per thread and copy: eight threads
copy the 128 bytes of a row that one swizzled box has. The copies end by themselves (`cp.async`). A
thread arrives at the full barrier when its copies have ended.

The copies write through the generic proxy, and the tensor cores read through the async proxy. So a
consumer has a fence between its wait and its products (`consumer.py`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..common.config import SWIZZLED
from ..common.gluon_names import copy_elements, reinterpret
from ..common.pipeline import PipelineState
from .config import (
    BLOCK_N,
    HALF,
    RANK,
    STAGES,
    copy_layout,
)
from .items import visit_items
from .producer import load_q


class CachedLatents(NamedTuple):
    """The cache in global memory.

    Args:
        cache: address of its first latent.
        block_stride, slot_stride: elements from block to block, and from slot to slot. Multiples of
            8.
    """

    cache: Any
    block_stride: Any
    slot_stride: Any


@gluon.jit
def produce_copies(shared, batch, q_desc, latents, segment, BLOCK_SIZE: gl.constexpr):
    """Run the copying warps: load Q, and copy the KV tiles of every work item of the segment.

    Args:
        latents: `CachedLatents`.
    """
    states = PipelineState.start(STAGES), PipelineState.start(1)
    visit_items(
        batch, segment, copy_item, (shared, batch, q_desc, latents, BLOCK_SIZE), states
    )


@gluon.jit
def copy_item(item, args, states):
    """Load an item's Q, and copy its KV tiles from the last to the first; return the next states.

    Rows past the end of a sequence become zeros, because they may hold NaN, and 0 * NaN = NaN.
    """
    shared, batch, q_desc, latents, _ = args
    BLOCK_SIZE: gl.constexpr = args[4]
    kv_state, q_state = states
    dtype: gl.constexpr = shared.p.dtype
    # one copy of a whole half: between copies to the same buffer the compiler has a barrier
    half_0 = reinterpret(shared.half_0, dtype, [STAGES, BLOCK_N, HALF], SWIZZLED)
    half_1 = reinterpret(shared.half_1, dtype, [STAGES, BLOCK_N, HALF], SWIZZLED)
    blocks = _load_blocks(batch, item, item.end - 1, BLOCK_SIZE)
    for i in range(item.end - item.begin):
        kv_tile = item.end - 1 - i
        # the next tile's block ids are loaded while this one waits for its stage
        next_tile = gl.maximum(kv_tile - 1, item.begin)
        next_blocks = _load_blocks(batch, item, next_tile, BLOCK_SIZE)
        position = _positions(kv_tile)
        offset = blocks.to(gl.int64) * latents.block_stride
        offset += (position % BLOCK_SIZE).to(gl.int64) * latents.slot_stride
        rows = latents.cache + offset  # [BLOCK_N]
        is_row = position < item.seq_len
        stage = kv_state.stage()
        shared.pipe_1.producer_acquire(kv_state)
        _copy_part(shared.rope.index(stage), rows, is_row, RANK)
        _copy_part(half_1.index(stage), rows, is_row, HALF)
        async_copy.mbarrier_arrive(
            shared.pipe_1.full_barrier(kv_state), increment_count=False
        )
        shared.pipe_0.producer_acquire(kv_state)
        _copy_part(half_0.index(stage), rows, is_row, 0)
        async_copy.mbarrier_arrive(
            shared.pipe_0.full_barrier(kv_state), increment_count=False
        )
        if i == 0:
            # after the first KV tile, which does not wait for the end of the item before
            load_q(shared, q_desc, q_state, batch, item)
        kv_state = kv_state.advance()
        blocks = next_blocks
    return kv_state, q_state.advance()


@gluon.jit
def _positions(kv_tile):
    """Return the positions of a KV tile's keys in their sequence.  # [BLOCK_N]"""
    return kv_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, copy_layout()))


@gluon.jit
def _load_blocks(batch, item, kv_tile, BLOCK_SIZE: gl.constexpr):
    """Return the block id of each row of a KV tile, and 0 for rows past the end.  # [BLOCK_N]"""
    entries = batch.block_table + item.req.to(gl.int64) * batch.block_table_stride
    position = _positions(kv_tile)
    # entries past the last block are never read
    ids = gl.load(
        entries + position // BLOCK_SIZE, mask=position < item.seq_len, other=0
    )
    return ids.to(gl.int32)


@gluon.jit
def _copy_part(part, rows, is_row, column: gl.constexpr):
    """Issue the copies of one part of a KV tile.

    Args:
        part: [BLOCK_N, columns] in shared memory.
        rows: [BLOCK_N] address of each latent.
        is_row: [BLOCK_N] whether the row is copied. Other rows become zeros.
        column: first column of the part.
    """
    COLUMNS: gl.constexpr = part.shape[1]
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, copy_layout()))
    # rows begin at a multiple of 16 bytes
    address = gl.multiple_of(rows[:, None] + columns[None, :], [1, 16])
    copy_elements(part, address, mask=is_row[:, None])
