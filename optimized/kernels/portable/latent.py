"""Latent attention: one tile of latents is the keys and the values of all query heads.

The latents of one request are read once for as many of its rows as possible. A query tile has up to
64 rows, which are query tokens times heads. If a request has more, several programs compute its
query tiles side by side, and read the same latents at the same time, so all but one of them find
these in the L2 cache. They are the columns of the grid. Each column is a stream-K partition
(stream_k.py): requests of any number of rows, and few requests fill the chip.

A query tile that spans several segments has a partial result in each. A second launch combines
them, because one program would need longer than the first launch: 64 rows of 512 float32 numbers
are 128 KiB per segment.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..softmax import finite, normalize, start_softmax
from .append import ALL_ROWS
from .arguments import CHANGING, KernelCall
from .attention_tile import attend_with_tile, make_query_tile
from .combine import segment_offset, store_partial
from .decode import keys_in_segment
from .epilogue import clear_padding, store_columns, store_rows
from .load_kv import locate_kv
from .load_q import QueryRows, find_queries, number_rows
from .options.sinks import start_with_sinks
from .stream_k import Batch, count_query_tiles, count_tiles, find_segment

MAX_SEGMENTS = tl.constexpr(512)
"""Segments of a launch, at most: those whose query tiles a program of the second launch counts."""
FIELDS = tl.constexpr(4)
"""Fields of an entry of `splits`."""


class LatentTensors(NamedTuple):
    """Pointers to the tensors of a call to latent attention.

    Args:
        q, k, v, block_table, query_start_loc, seq_lens, out, lse: as in `Tensors`. v is not read.
        partial_out, partial_lse: as in `Tensors`, [segments, 2, columns, rows].
        splits: [columns, FIELDS, MAX_SEGMENTS] int32: the query tile that begins in a segment and
            ends in a later one. The fields are that segment, or -1 without one; the
            first token of the request; how many tokens it has; and the tile's first row.
    """

    q: Any
    k: Any
    v: Any
    block_table: Any
    query_start_loc: Any
    seq_lens: Any
    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    splits: Any


class Combination(NamedTuple):
    """Compile-time constants of the second launch.

    Args:
        ROWS, CHANNELS: rows, and elements of each, of a program.
        SPLITS: partial results that it loads at once.
    """

    ROWS: int
    CHANNELS: int
    SPLITS: int


@triton.jit
def clear_splits(splits, column, index, num_segments):
    """Note that no query tile is split, in an entry of `splits` and in those past the last segment.

    Args:
        index: the entry's segment. The program of segment 0 clears those past the last one.
    """
    last = splits + column * FIELDS * MAX_SEGMENTS
    tl.store(last + index, -1)
    if index == 0:
        segment = tl.arange(0, MAX_SEGMENTS)
        tl.store(last + segment, -1, mask=segment >= num_segments)


@triton.jit
def store_split_tile(
    call, segment, index, tile_index, num_tiles, rows, start, result, lse,
    config: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a query tile that spans several segments.

    The program of its first segment notes the tile in `splits`.

    Args:
        segment, index: this program's segment.
        tile_index, num_tiles: first of the query tile's KV tiles, and how many it has.
        rows: QueryRows of the tile.
        start: first token of the request in the batch.
        result, lse: [BLOCK_M, BLOCK_DV], [BLOCK_M].
    """
    column, columns = tl.program_id(0), tl.num_programs(0)
    begins_here = (tile_index >= segment.begin).to(tl.int32)
    offset = segment_offset(index, begins_here, column, columns, call.partial_rows)
    store_partial(call, offset, result, lse, rows.is_row, config)
    if begins_here == 1:
        entry = call.tensors.splits + column * FIELDS * MAX_SEGMENTS + index
        last = (tile_index + num_tiles - 1) // segment.length
        # the entry was cleared by the same thread
        tl.store(entry, last.to(tl.int32))
        tl.store(entry + MAX_SEGMENTS, start.to(tl.int32))
        tl.store(entry + 2 * MAX_SEGMENTS, rows.query_len.to(tl.int32))
        tl.store(entry + 3 * MAX_SEGMENTS, rows.first_row.to(tl.int32))


@triton.jit
def attend_in_column(
    call, segment, index, tile_index, kv, seq_len, req, start, query_len,
    first_tile, num_tiles, column_tiles, config: tl.constexpr,
):  # fmt: skip
    """Attend with those query tiles of one request that are in a segment and in this column.

    Args:
        segment, index: this program's segment.
        tile_index: index of the request's first KV tile among all tiles.
        kv, seq_len: its KVSource, and its keys.
        start, query_len: its first token in the batch, and how many it has.
        first_tile, num_tiles: first KV tile in the sequence, and KV tiles per query tile.
        column_tiles: query tiles of the request in the fullest column.
    """
    column, columns = tl.program_id(0), tl.num_programs(0)
    first = tl.maximum(segment.begin - tile_index, 0) // num_tiles
    end = tl.minimum(tl.cdiv(segment.end - tile_index, num_tiles), column_tiles)
    for in_column in range(first, end):
        first_row = (in_column * columns + column) * config.BLOCK_M
        if first_row < query_len * config.GROUP_SIZE:
            tile = make_query_tile(
                call, kv, seq_len, req, start, query_len, first_row, kv.kv_head, config
            )
            own_index = tile_index + in_column * num_tiles
            key_begin, key_end, is_whole = keys_in_segment(
                segment, own_index, first_tile, num_tiles, tile.visible, config
            )
            result, lse = attend_with_tile(
                call, tile, key_begin, key_end, is_whole, kv.kv_head, config
            )
            if is_whole:
                store_rows(call, result, lse, tile.rows, config)
            else:
                store_split_tile(
                    call, segment, index, own_index, num_tiles, tile.rows, start,
                    result, lse, config,
                )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def latent_kernel(
    tensors,
    option_tensors,
    num_tokens,
    num_reqs,
    num_search_steps,
    partial_rows,
    scale,
    table_stride_req,
    lse_stride_head,
    lse_stride_token,
    strides,
    masks,
    scores,
    scale_strides,
    tree_stride_req,
    tree_width,
    config: tl.constexpr,
    plan: tl.constexpr,
):
    """Attend with all requests. Grid: (columns, segments).

    Args:
        tensors, option_tensors, strides, masks, scores, scale_strides, config, plan: LatentTensors,
            OptionTensors, Strides, MaskArguments, ScoreArguments, ScaleStrides, Config, StreamK.
        num_search_steps: not used here.
        partial_rows: rows of a query tile, at most, for which the workspace has room.
    """
    column, columns = tl.program_id(0), tl.num_programs(0)
    index, num_segments = tl.program_id(1), tl.num_programs(1)
    kv_head = tl.program_id(2)  # the only one
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    batch = Batch(
        tensors.query_start_loc, tensors.seq_lens, masks.causal, num_reqs, ALL_ROWS, None,
        columns,
    )  # fmt: skip
    clear_splits(tensors.splits, column, index, num_segments)
    ALL_KEYS: tl.constexpr = masks.tree is not None or masks.query_ranges is not None
    segment = find_segment(index, num_segments, batch, config, plan, ALL_KEYS)
    clear_padding(
        call, num_tokens, num_reqs, index * columns + column, num_segments * columns,
        kv_head, config,
    )  # fmt: skip
    tile_index = segment.first_tile
    for req in range(segment.first_req, segment.end_req):
        start, query_len = find_queries(tensors.query_start_loc, req)
        if query_len > 0:
            kv, seq_len = locate_kv(call, req, kv_head, config)
            first_tile, num_tiles = count_tiles(batch, req, True, config, ALL_KEYS)
            column_tiles = count_query_tiles(batch, req, True, config)
            attend_in_column(
                call, segment, index, tile_index, kv, seq_len, req, start, query_len,
                first_tile, num_tiles, column_tiles, config,
            )  # fmt: skip
            tile_index += num_tiles * column_tiles


@triton.jit
def find_split(splits, index):
    """Return the segment in which a column's split query tile `index` begins.

    It is MAX_SEGMENTS if there is none.

    Args:
        splits: pointer to the column's entries.
    """
    segment = tl.arange(0, MAX_SEGMENTS)
    is_split = tl.load(splits + segment) >= 0
    is_found = is_split & (tl.cumsum(is_split.to(tl.int32), 0) == index + 1)
    return tl.min(tl.where(is_found, segment, MAX_SEGMENTS), 0)


@triton.jit
def combine_channels(
    call, rows, in_tile, dv, first, last, column, columns,
    config: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Return elements `dv` of rows, combined from their segments: [ROWS, CHANNELS], and [ROWS].

    Args:
        rows: QueryRows.
        in_tile, dv: [ROWS], [CHANNELS].
        first, last: the segments that the query tile spans.
    """
    acc, l_i, m_i = start_softmax(plan.ROWS, plan.CHANNELS)
    l_i, m_i = start_with_sinks(
        l_i, m_i, call.option_tensors.sinks, rows.head, rows.is_row, True
    )
    for begin in range(first, last + 1, plan.SPLITS):
        segment = begin + tl.arange(0, plan.SPLITS)
        offset = segment_offset(
            segment, (segment == first).to(tl.int32), column, columns, call.partial_rows
        )
        row = offset[:, None] + in_tile[None, :]  # [SPLITS, ROWS]
        is_row = (segment <= last)[:, None] & rows.is_row[None, :]
        lse = tl.load(call.tensors.partial_lse + row, mask=is_row, other=-float("inf"))
        results = tl.load(
            call.tensors.partial_out + row[:, :, None] * config.V_HEAD_DIM + dv,
            mask=is_row[:, :, None] & (dv < config.V_HEAD_DIM),
            other=0.0,
        )  # [SPLITS, ROWS, CHANNELS]
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        shift = finite(m_new)
        alpha = tl.exp2(m_i - shift)
        weights = tl.exp2(lse - shift[None, :])
        acc = acc * alpha[:, None] + tl.sum(results * weights[:, :, None], 0)
        l_i = l_i * alpha + tl.sum(weights, 0)
        m_i = m_new
    return normalize(acc, l_i, m_i)


@triton.jit(do_not_specialize=CHANGING)
def latent_combine_kernel(
    tensors,
    option_tensors,
    num_tokens,
    num_reqs,
    num_search_steps,
    partial_rows,
    scale,
    table_stride_req,
    lse_stride_head,
    lse_stride_token,
    strides,
    masks,
    scores,
    scale_strides,
    tree_stride_req,
    tree_width,
    config: tl.constexpr,
    plan: tl.constexpr,
):
    """Store the rows of split query tiles.

    Grid: (groups of rows times groups of channels, columns, split query tiles).

    Args:
        As in `latent_kernel`, and plan: Combination.
    """
    column, columns = tl.program_id(1), tl.num_programs(1)
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    entries = tensors.splits + column * FIELDS * MAX_SEGMENTS
    first = find_split(entries, tl.program_id(2))
    if first < MAX_SEGMENTS:
        last = tl.load(entries + first)
        start = tl.load(entries + MAX_SEGMENTS + first)
        query_len = tl.load(entries + 2 * MAX_SEGMENTS + first)
        first_row = tl.load(entries + 3 * MAX_SEGMENTS + first)
        CHANNEL_GROUPS: tl.constexpr = config.BLOCK_DV // plan.CHANNELS
        group = tl.program_id(0) // CHANNEL_GROUPS
        in_tile = group * plan.ROWS + tl.arange(0, plan.ROWS)
        dv = tl.program_id(0) % CHANNEL_GROUPS * plan.CHANNELS
        dv += tl.arange(0, plan.CHANNELS)
        rows = number_rows(start, query_len, first_row, in_tile, 0, config)
        # the last group may have rows of the next query tile
        is_row = rows.is_row & (in_tile < partial_rows)
        rows = QueryRows(
            query_len, first_row, rows.num_rows, rows.token, rows.token_index, rows.head,
            is_row,
        )  # fmt: skip
        result, lse = combine_channels(
            call, rows, in_tile, dv, first, last, column, columns, config, plan
        )
        store_columns(call, result, lse, rows, dv, config)
