"""Producer warp of the Hopper latent decode kernel: TMA loads of Q and of the KV tiles.

A KV tile is loaded as boxes of [box rows, 64] elements. A box does not cross a cache block. The
two value halves of a tile have a ring of barriers each, so that a half is loaded again as soon as
its last reader has released it. The rope columns belong to the ring of half 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from ..common.config import SWIZZLE_ROWS, SWIZZLED_32_BIT
from ..common.gluon_names import async_load, reinterpret
from ..common.pipeline import PipelineState
from .config import (
    BLOCK_M,
    BLOCK_N,
    BOX_COLUMNS,
    HALF,
    HALF_BOXES,
    RANK,
    ROPE_DIM,
    STAGES,
)
from .items import visit_items


@gluon.jit
def produce(shared, batch, q_desc, kv, segment, BLOCK_SIZE: gl.constexpr):
    """Run the producer warp: load Q and the KV tiles of every work item of the segment.

    Args:
        kv: `TmaTensor` of the cache.
    """
    start = PipelineState.start(1)
    states = PipelineState.start(STAGES), start, start
    visit_items(
        batch, segment, load_item, (shared, batch, q_desc, kv, BLOCK_SIZE), states
    )


@gluon.jit
def load_item(item, args, states):
    """Load an item's Q, and its KV tiles from the last to the first; return the next states.

    Rows past the end of a sequence may hold NaN, and 0 * NaN = NaN, so their values are cleared.
    The loads of such a tile signal the last full barrier of each ring, where only this warp waits.
    """
    shared, batch, q_desc, kv, _ = args
    BLOCK_SIZE: gl.constexpr = args[4]
    kv_state, q_state, tail_state = states
    ROW_BOXES: gl.constexpr = BLOCK_N // kv.desc.block_type.shape[0]
    valid_rows = item.seq_len - (item.end - 1) * BLOCK_N
    rows = _box_rows(batch, item, item.end - 1, kv.block_rows, ROW_BOXES, BLOCK_SIZE)
    for i in range(item.end - item.begin):
        # the next tile's block ids are loaded while this one waits for its stage
        next_tile = gl.maximum(item.end - 2 - i, item.begin)
        next_rows = _box_rows(
            batch, item, next_tile, kv.block_rows, ROW_BOXES, BLOCK_SIZE
        )
        stage = kv_state.stage()
        # only the last tile, which is loaded first, can reach past the sequence's end
        is_tail = (i == 0) & (valid_rows < BLOCK_N)
        full = gl.where(is_tail, STAGES, stage)
        shared.pipe_1.producer_acquire(kv_state)
        barrier = shared.pipe_1.full.index(full)
        mbarrier.expect(barrier, BLOCK_N * (HALF + ROPE_DIM) * 2)
        _load_boxes(kv.desc, shared.rope, stage, barrier, rows, RANK, 1)
        _load_boxes(kv.desc, shared.half_1, stage, barrier, rows, HALF, HALF_BOXES)
        shared.pipe_0.producer_acquire(kv_state)
        barrier = shared.pipe_0.full.index(full)
        mbarrier.expect(barrier, BLOCK_N * HALF * 2)
        _load_boxes(kv.desc, shared.half_0, stage, barrier, rows, 0, HALF_BOXES)
        if i == 0:
            # after the first KV tile, which does not wait for the end of the item before
            load_q(shared, q_desc, q_state, batch, item)
        if is_tail:
            mbarrier.wait(shared.pipe_1.full.index(STAGES), tail_state.phase())
            mbarrier.wait(shared.pipe_0.full.index(STAGES), tail_state.phase())
            tail_state = tail_state.advance()
            _clear_rows(shared.half_1, stage, valid_rows)
            _clear_rows(shared.half_0, stage, valid_rows)
            # ordinary stores, before the tensor cores read through the async proxy
            fence_async_shared()
            shared.pipe_1.producer_commit(kv_state)
            shared.pipe_0.producer_commit(kv_state)
        kv_state = kv_state.advance()
        rows = next_rows
    return kv_state, q_state.advance(), tail_state


@gluon.jit
def load_q(shared, desc, state, batch, item):
    """Load the query rows of an item. Rows past the box hold anything."""
    row = item.query_start * batch.num_heads + item.row_tile * BLOCK_M
    Q_ROWS: gl.constexpr = desc.block_type.shape[0]
    ROW_BOXES: gl.constexpr = BLOCK_M // Q_ROWS
    shared.q_pipe.producer_acquire(state)
    full = shared.q_pipe.full_barrier(state)
    mbarrier.expect(full, Q_ROWS * (RANK + ROPE_DIM) * 2)
    async_load(desc, [row, RANK], full, shared.q_rope.index(0))
    for j in gl.static_range(HALF_BOXES):
        async_load(
            desc,
            [row, HALF + j * BOX_COLUMNS],
            full,
            shared.q_1.index(j * ROW_BOXES),
        )
    for j in gl.static_range(HALF_BOXES):
        async_load(desc, [row, j * BOX_COLUMNS], full, shared.q_0.index(j * ROW_BOXES))


@gluon.jit
def _box_rows(
    batch,
    item,
    kv_tile,
    block_rows,
    ROW_BOXES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Return the first row of each box of a KV tile, as a tuple of ROW_BOXES numbers.

    Args:
        block_rows: rows from cache block to cache block.
    """
    BOX_ROWS: gl.constexpr = BLOCK_N // ROW_BOXES
    rows = ()
    entries = batch.block_table + item.req.to(gl.int64) * batch.block_table_stride
    last_entry = (item.seq_len - 1) // BLOCK_SIZE
    for box in gl.static_range(ROW_BOXES):
        position = kv_tile * BLOCK_N + box * BOX_ROWS
        # entries past the last block are never read; the keys loaded instead are masked
        entry = gl.minimum(position // BLOCK_SIZE, last_entry)
        block = gl.load(entries + entry).to(gl.int32)
        row = block * block_rows + position % BLOCK_SIZE
        # the compiler has no other way to lengthen a tuple
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _load_boxes(
    desc,
    boxes,
    stage,
    barrier,
    rows,
    column: gl.constexpr,
    COLUMN_BOXES: gl.constexpr,
):
    """Start the TMA loads of one part of a KV tile.

    A stage is stored as [COLUMN_BOXES, BLOCK_N, 64], the order of a swizzled tile of
    [BLOCK_N, COLUMN_BOXES * 64].
    """
    ROW_BOXES: gl.constexpr = BLOCK_N // desc.block_type.shape[0]
    for i in gl.static_range(ROW_BOXES):
        for j in gl.static_range(COLUMN_BOXES):
            async_load(
                desc,
                [rows[i], column + j * BOX_COLUMNS],
                barrier,
                boxes.index((stage * COLUMN_BOXES + j) * ROW_BOXES + i),
            )


@gluon.jit
def _clear_rows(boxes, stage, first_row):
    """Set the rows of a half to zero from `first_row` on.

    Two elements are handled as one word, in chunks of eight rows, after which the swizzle repeats.
    """
    CHUNKS: gl.constexpr = BLOCK_N // SWIZZLE_ROWS
    ROWS: gl.constexpr = boxes.shape[0] * boxes.shape[1]
    WORDS: gl.constexpr = BOX_COLUMNS // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = reinterpret(
        boxes, gl.int32, [ROWS // SWIZZLE_ROWS, SWIZZLE_ROWS, WORDS], SWIZZLED_32_BIT
    )
    row = gl.arange(0, SWIZZLE_ROWS, gl.SliceLayout(1, layout))  # [8]
    zeros = gl.zeros([SWIZZLE_ROWS, WORDS], gl.int32, layout)
    first_chunk = first_row // SWIZZLE_ROWS
    is_kept = first_chunk * SWIZZLE_ROWS + row < first_row  # [8]
    for j in gl.static_range(HALF_BOXES):
        words = chunks.index((stage * HALF_BOXES + j) * CHUNKS + first_chunk)  # [8, 32]
        words.store(gl.where(is_kept[:, None], words.load(layout), 0))
    for chunk in range(first_chunk + 1, CHUNKS):
        for j in gl.static_range(HALF_BOXES):
            chunks.index((stage * HALF_BOXES + j) * CHUNKS + chunk).store(zeros)
