"""TMA loads of K and V tiles in the Hopper kernels.

A KV tile of BLOCK_N keys is loaded as boxes of [box rows, 64] elements. A box does not cross a
cache block, so with blocks of 16 tokens a tile of 128 keys of head size 128 is 8 x 2 boxes.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from .config import BOX_COLUMNS, SWIZZLE_ROWS, SWIZZLED_3D, SWIZZLED_32_BIT
from .gluon_names import async_load, reinterpret
from .tile_range import first_kv_tile, first_visible_key
from .traits import has_lower_bound

MAX_ROWS_AHEAD = gl.constexpr(8)
"""Boxes per 64 columns of a tile, at most, with which the next tile's block ids are loaded before
this tile's boxes. With blocks of 8 tokens a tile has 16, which take more registers than a producer
warp has."""


class TmaTensor(NamedTuple):
    """A tensor of heads as a plane of rows, which TMA addresses by row and column.

    Args:
        desc: the tensor map. That of padded heads, and with several query heads in a tile that of
            queries and outputs, has a dimension of heads: rows, heads and columns. Then the steps
            from head to head are not used; `head_rows` of keys and values is 0.
        block_rows: rows from cache block to cache block; 0 without blocks.
        head_rows, head_columns: rows and columns from head to head; one of them is 0.
    """

    desc: Any
    block_rows: Any
    head_rows: Any
    head_columns: Any


@gluon.jit
def locate_kv(args):
    """Return the `TmaTensor` of keys and that of values of a kernel's arguments."""
    k = TmaTensor(args.k_desc, args.k_block_rows, args.k_head_rows, args.k_head_columns)
    v = TmaTensor(args.v_desc, args.v_block_rows, args.v_head_rows, args.v_head_columns)
    return k, v


@gluon.jit
def load_k(
    shared,
    batch,
    k,
    state,
    work,
    config: gl.constexpr,
):
    """Load a work item's K tiles, from the last to the first, and return the next state."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROW_BOXES: gl.constexpr = BLOCK_N // k.desc.block_type.shape[0]
    kv_head = work.head // batch.group_size
    column = kv_head * k.head_columns
    begin = work.kv_start + kv_head * k.head_rows
    last_tile = first_kv_tile(work, config) + work.num_kv_tiles - 1
    rows = _box_rows(batch, work, last_tile, begin, k.block_rows, ROW_BOXES, config)
    for i in range(work.num_kv_tiles):
        next_tile = gl.maximum(last_tile - 1 - i, 0)
        if ROW_BOXES <= MAX_ROWS_AHEAD:
            # the next tile's block ids are loaded while this one waits for its stage
            next_rows = _box_rows(
                batch, work, next_tile, begin, k.block_rows, ROW_BOXES, config
            )
        shared.k_pipe.producer_acquire(state)
        full = shared.k_pipe.full_barrier(state)
        _load_boxes(
            k.desc, shared.k, shared.k_tail, state.stage(), full, rows, kv_head, column,
            BLOCK_N, config.KEY_DIM, config.TAIL_DIM,
        )  # fmt: skip
        if ROW_BOXES > MAX_ROWS_AHEAD:
            next_rows = _box_rows(
                batch, work, next_tile, begin, k.block_rows, ROW_BOXES, config
            )
        state = state.advance()
        rows = next_rows
    return state


@gluon.jit
def load_v(
    shared,
    batch,
    v,
    state,
    tail_state,
    work,
    config: gl.constexpr,
):
    """Load a work item's V tiles, from the last to the first, and return the next states.

    Rows past the end of a sequence may hold NaN, and 0 * NaN = NaN, so they are cleared. There is
    no race. The loads of such a tile signal the last full barrier of `v_pipe`, where only this
    warp waits. The warp writes zeros, fences them for the tensor cores, and then arrives at the
    stage's full barrier, where the consumers wait. TMA fills the stage again only after all
    consumers have released it.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROW_BOXES: gl.constexpr = BLOCK_N // v.desc.block_type.shape[0]
    kv_head = work.head // batch.group_size
    column = kv_head * v.head_columns
    begin = work.kv_start + kv_head * v.head_rows
    last_tile = first_kv_tile(work, config) + work.num_kv_tiles - 1
    valid_rows = work.seq_len - last_tile * BLOCK_N
    rows = _box_rows(batch, work, last_tile, begin, v.block_rows, ROW_BOXES, config)
    for i in range(work.num_kv_tiles):
        next_tile = gl.maximum(last_tile - 1 - i, 0)
        if ROW_BOXES <= MAX_ROWS_AHEAD:
            next_rows = _box_rows(
                batch, work, next_tile, begin, v.block_rows, ROW_BOXES, config
            )
        # V tile i - 1 is released together with K tile i
        shared.v_pipe.producer_acquire(state.advance())
        # only the last tile, which is loaded first, can reach past the sequence's end
        is_tail = (i == 0) & (valid_rows < BLOCK_N)
        full = shared.v_pipe.full.index(
            gl.where(is_tail, state.num_stages, state.stage())
        )
        _load_boxes(
            v.desc, shared.v, shared.v_tail, state.stage(), full, rows, kv_head, column,
            BLOCK_N, config.HEAD_DIM, config.V_TAIL_DIM,
        )  # fmt: skip
        if is_tail:
            tail_full = shared.v_pipe.full.index(state.num_stages)
            mbarrier.wait(tail_full, tail_state.phase())
            tail_state = tail_state.advance()
            _clear_rows(shared.v, state.stage(), valid_rows, BLOCK_N, config.HEAD_DIM)
            if config.V_TAIL_DIM > 0:
                _clear_rows(
                    shared.v_tail, state.stage(), valid_rows, BLOCK_N, config.V_TAIL_DIM
                )
            # ordinary stores, before the tensor cores read through the async proxy
            fence_async_shared()
            shared.v_pipe.producer_commit(state)
        if ROW_BOXES > MAX_ROWS_AHEAD:
            next_rows = _box_rows(
                batch, work, next_tile, begin, v.block_rows, ROW_BOXES, config
            )
        state = state.advance()
        rows = next_rows
    return state, tail_state


@gluon.jit
def _box_rows(
    batch,
    work,
    kv_tile,
    begin,
    block_rows,
    ROW_BOXES: gl.constexpr,
    config: gl.constexpr,
):
    """Return the first row of each box of a KV tile, as a tuple of ROW_BOXES numbers.

    Blocks before a window or chunk may have been reallocated, and hold NaN. Boxes of such keys get
    a negative row: TMA reads no memory for them and fills them with zeros.

    Args:
        begin: row of the KV head's first key.
        block_rows: rows from cache block to cache block.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_SIZE: gl.constexpr = config.BLOCK_SIZE
    BOX_ROWS: gl.constexpr = BLOCK_N // ROW_BOXES
    rows = ()
    # block ids and rows fit 32 bits here and elsewhere: the host has checked it (`supports`)
    if BLOCK_SIZE > 0:
        entries = (
            batch.block_table + work.table_row.to(gl.int64) * batch.block_table_stride
        )
        last_entry = (work.seq_len - 1) // BLOCK_SIZE
        for box in gl.static_range(ROW_BOXES):
            position = kv_tile * BLOCK_N + box * BOX_ROWS
            # entries past the last block are never read; the keys loaded instead are masked
            entry = gl.minimum(position // BLOCK_SIZE, last_entry)
            block = gl.load(entries + entry).to(gl.int32)
            row = begin + block * block_rows + position % BLOCK_SIZE
            if has_lower_bound(config):
                first_key = first_visible_key(work.position, config)
                row = gl.where(position + BOX_ROWS <= first_key, -BOX_ROWS, row)
            # the compiler has no other way to lengthen a tuple
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        for box in gl.static_range(ROW_BOXES):
            row = begin + kv_tile * BLOCK_N + box * BOX_ROWS
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _load_boxes(
    desc,
    boxes,
    tail,
    stage,
    full,
    rows,
    kv_head,
    column,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    TAIL_DIM: gl.constexpr,
):
    """Start the TMA loads of a KV tile, which signal `full`.

    A stage is stored as [DIM / 64, BLOCK_N, 64], the order of a swizzled tile of [BLOCK_N, DIM].

    Args:
        boxes: `SharedStorage.k` or `.v`.
        tail: its tail, of [BLOCK_N, TAIL_DIM] per stage. Without TAIL_DIM it is not used.
        kv_head, column: the KV head, and its first column in a plane. A map of padded heads has
            rows, heads and columns: it reads no memory for columns that a head does not have.
    """
    ROW_BOXES: gl.constexpr = BLOCK_N // desc.block_type.shape[0]
    COLUMN_BOXES: gl.constexpr = DIM // BOX_COLUMNS
    mbarrier.expect(full, BLOCK_N * (DIM + TAIL_DIM) * 2)
    HAS_HEADS: gl.constexpr = len(desc.block_type.shape) == 3
    if HAS_HEADS:
        boxes = _with_heads(boxes, desc)
        tail = _with_heads(tail, desc)
    for i in gl.static_range(ROW_BOXES):
        for j in gl.static_range(COLUMN_BOXES):
            index = (stage * COLUMN_BOXES + j) * ROW_BOXES + i
            if HAS_HEADS:
                start = [rows[i], kv_head, j * BOX_COLUMNS]
            else:
                start = [rows[i], column + j * BOX_COLUMNS]
            async_load(desc, start, full, boxes.index(index))
        if TAIL_DIM > 0:
            if HAS_HEADS:  # noqa: SIM108 (constexpr branches)
                start = [rows[i], kv_head, DIM]
            else:
                start = [rows[i], column + DIM]
            async_load(desc, start, full, tail.index(stage * ROW_BOXES + i))


@gluon.jit
def _with_heads(boxes, desc):
    """Return boxes of keys or values with the dimension of heads of their tensor map."""
    box: gl.constexpr = desc.block_type.shape
    shape: gl.constexpr = [boxes.shape[0], box[0], box[1], box[2]]
    return reinterpret(boxes, desc.dtype, shape, SWIZZLED_3D)


@gluon.jit
def _clear_rows(boxes, stage, first_row, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Set the rows of a stage of [BLOCK_N, DIM] to zero from `first_row` on.

    Two elements are handled as one word, in chunks of eight rows, after which the swizzle repeats.
    """
    COLUMN_BOXES: gl.constexpr = DIM // BOX_COLUMNS
    CHUNKS: gl.constexpr = BLOCK_N // SWIZZLE_ROWS
    ROWS: gl.constexpr = boxes.shape[0] * boxes.shape[1]
    WORDS: gl.constexpr = BOX_COLUMNS // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = reinterpret(
        boxes, gl.int32, [ROWS // SWIZZLE_ROWS, SWIZZLE_ROWS, WORDS], SWIZZLED_32_BIT
    )
    row = gl.arange(0, SWIZZLE_ROWS, gl.SliceLayout(1, layout))  # [8]
    for chunk in range(first_row // SWIZZLE_ROWS, CHUNKS):
        is_kept = chunk * SWIZZLE_ROWS + row < first_row  # [8]
        for j in gl.static_range(COLUMN_BOXES):
            words = chunks.index((stage * COLUMN_BOXES + j) * CHUNKS + chunk)  # [8, 32]
            words.store(gl.where(is_kept[:, None], words.load(layout), 0))
