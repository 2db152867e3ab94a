"""Append kernel: requests of any number of rows, split over the keys in a stream-K partition.

Verifications of drafts and short appends have more rows than a decode tile, and their sequences are
long. Their KV tiles are counted once per query tile, concatenated and divided evenly (stream_k.py),
so a few requests fill the chip. Each program processes one contiguous segment for one kv head: the
last tiles of one query tile, whole query tiles, and the first tiles of another one.
"""

import triton
import triton.language as tl

from ..softmax import normalize, start_softmax
from .arguments import CHANGING, KernelCall
from .attention_tile import attend_to_keys, make_query_tile
from .cascade_prefix import fold_prefix, store_prefix
from .combine import arrive, fold_partial, fold_segments, segment_offset, store_partial
from .decode import keys_in_segment
from .epilogue import clear_padding, store_rows
from .formats.cache_format import scale_values
from .load_kv import KVSource, locate_kv
from .load_q import find_queries
from .options.sinks import start_with_sinks
from .stream_k import Batch, count_query_tiles, count_tiles, find_segment

ALL_ROWS = tl.constexpr(1 << 30)
"""More rows than any request has: every request is in the partition."""
# what a launch attends to: all keys; the shared prefix alone; or the keys after it
WHOLE, PREFIX, REST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def locate_rest(call, req, prefix, kv_head, config: tl.constexpr):
    """Return the keys and values of a request after the shared prefix, and their number.

    Args:
        prefix: Optional. PrefixPartials. If None, all keys of the request are returned.
    """
    kv, seq_len = locate_kv(call, req, kv_head, config)
    if prefix is not None:
        seq_len = tl.maximum(seq_len - prefix.length, 0)
        entries = prefix.length // config.BLOCK_SIZE * call.strides.table_entry
        kv = KVSource(kv.k, kv.v, kv.block_table + entries, kv.kv_head)
    return kv, seq_len


@triton.jit
def attend_to_split(
    call, tile, begin, end, is_whole, prefix, config: tl.constexpr, KEYS: tl.constexpr
):
    """Return the rows of a query tile and their log-sum-exp, over the keys from `begin` to `end`.

    Args:
        begin, end: a multiple of BLOCK_N, and any index.
        is_whole: whether these are all keys of the launch. Then the sinks and the shared prefix
            count too; otherwise they count where the partial results are combined.

    Returns:
        [BLOCK_M, BLOCK_DV], without the scale of the values; [BLOCK_M] in base 2.
    """
    acc, l_i, m_i = start_softmax(config.BLOCK_M, config.BLOCK_DV)
    l_i, m_i = start_with_sinks(
        l_i, m_i, call.option_tensors.sinks, tile.rows.head, tile.rows.is_row, is_whole
    )
    acc, l_i, m_i = attend_to_keys(acc, l_i, m_i, call, tile, begin, end, config)
    if KEYS == REST:
        acc, l_i, m_i = fold_prefix(
            acc, l_i, m_i, prefix, tile.rows, is_whole, config, config.BLOCK_M
        )
    return normalize(acc, l_i, m_i)


@triton.jit
def store_finished_rows(
    call, result, lse, rows, prefix, kv_head, config: tl.constexpr, KEYS: tl.constexpr
):
    """Store rows that have attended to all keys.

    Args:
        result, lse: [BLOCK_M, BLOCK_DV], without the scale of the values; [BLOCK_M] in base 2.
        rows: QueryRows.
        prefix: Optional. PrefixPartials.
        KEYS: WHOLE, REST, or PREFIX: then the rows are partial results in the workspace.
    """
    if KEYS == PREFIX:
        store_prefix(prefix, result, lse, rows, config)
    else:
        result = scale_values(result, call, kv_head, config)
        store_rows(call, result, lse, rows, config)


@triton.jit
def store_split_tile(
    call, segment, index, tile_index, num_tiles, rows, start, result, lse, prefix,
    kv_head, num_kv_heads,
    config: tl.constexpr, plan: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a query tile that spans several segments.

    The program that arrives last combines the partial results of all segments.

    Args:
        segment, index: this program's segment.
        tile_index, num_tiles: first of the query tile's KV tiles, and how many it has.
        rows: QueryRows of the tile.
        start: first token of the request in the batch.
        result, lse: [BLOCK_M, BLOCK_DV], [BLOCK_M].
    """
    begins_here = (tile_index >= segment.begin).to(tl.int32)
    offset = segment_offset(
        index, begins_here, kv_head, num_kv_heads, call.partial_rows
    )
    store_partial(call, offset, result, lse, rows.is_row, config)
    # only one query tile crosses the end of a segment, so its first segment has one counter
    first = tile_index // segment.length
    last = (tile_index + num_tiles - 1) // segment.length
    semaphore = call.tensors.semaphores + first * num_kv_heads + kv_head
    if arrive(semaphore, last - first + 1):
        tl.store(semaphore, 0)  # for the next launch
        rows_in_tile = tl.minimum(rows.num_rows - rows.first_row, call.partial_rows)
        for first_in_tile in range(0, rows_in_tile, plan.COMBINE_ROWS):
            in_tile = first_in_tile + tl.arange(0, plan.COMBINE_ROWS)
            combined, combined_lse, combined_rows = fold_segments(
                call, start, rows.query_len, rows.first_row, in_tile, first, last,
                kv_head, num_kv_heads, config, plan.COMBINE_ROWS, plan.COMBINE_SPLITS,
            )  # fmt: skip
            if KEYS == REST:
                acc, l_i, m_i = start_softmax(plan.COMBINE_ROWS, config.BLOCK_DV)
                acc, l_i, m_i = fold_partial(acc, l_i, m_i, combined, combined_lse)
                acc, l_i, m_i = fold_prefix(
                    acc, l_i, m_i, prefix, combined_rows, True, config,
                    plan.COMBINE_ROWS,
                )  # fmt: skip
                combined, combined_lse = normalize(acc, l_i, m_i)
            store_finished_rows(
                call, combined, combined_lse, combined_rows, prefix, kv_head, config,
                KEYS,
            )  # fmt: skip


@triton.jit
def attend_in_segment(
    call, segment, index, tile_index, kv, seq_len, req, start, query_len,
    first_tile, num_tiles, query_tiles, prefix, kv_head,
    config: tl.constexpr, plan: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend with those query tiles of one request whose KV tiles are in a segment.

    Args:
        segment, index: this program's segment.
        tile_index: index of the request's first KV tile among all tiles.
        kv, seq_len: its KVSource, and its keys.
        start, query_len: its first token in the batch, and how many it has.
        first_tile, num_tiles: first KV tile in the sequence, and KV tiles per query tile.
        query_tiles: how many query tiles the request has.
    """
    num_kv_heads = tl.num_programs(0)
    first = tl.maximum(segment.begin - tile_index, 0) // num_tiles
    end = tl.minimum(tl.cdiv(segment.end - tile_index, num_tiles), query_tiles)
    for query_tile in range(first, end):
        tile = make_query_tile(
            call, kv, seq_len, req, start, query_len, query_tile * config.BLOCK_M,
            kv_head, config,
        )  # fmt: skip
        own_index = tile_index + query_tile * num_tiles
        key_begin, key_end, is_whole = keys_in_segment(
            segment, own_index, first_tile, num_tiles, tile.visible, config
        )
        result, lse = attend_to_split(
            call, tile, key_begin, key_end, is_whole, prefix, config, KEYS
        )
        if is_whole:
            store_finished_rows(
                call, result, lse, tile.rows, prefix, kv_head, config, KEYS
            )
        else:
            store_split_tile(
                call, segment, index, own_index, num_tiles, tile.rows, start, result,
                lse, prefix, kv_head, num_kv_heads, config, plan, KEYS,
            )  # fmt: skip


@triton.jit
def attend_with_requests(
    call, num_tokens, num_reqs, prefix,
    config: tl.constexpr, plan: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend with all requests, in this program's segment, and clear the rows of padding.

    Args:
        prefix: Optional. PrefixPartials, whose keys are left out.
        KEYS: WHOLE without a prefix, REST with one.
    """
    # the kv heads of a segment run at the same time, as their keys are stored in the same blocks
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    tensors, masks = call.tensors, call.masks
    batch = Batch(
        tensors.query_start_loc, tensors.seq_lens, masks.causal, num_reqs, ALL_ROWS,
        prefix, 1,
    )  # fmt: skip
    ALL_KEYS: tl.constexpr = masks.tree is not None or masks.query_ranges is not None
    segment = find_segment(index, tl.num_programs(1), batch, config, plan, ALL_KEYS)
    clear_padding(
        call, num_tokens, num_reqs, index, tl.num_programs(1), kv_head, config
    )
    tile_index = segment.first_tile
    for req in range(segment.first_req, segment.end_req):
        start, query_len = find_queries(tensors.query_start_loc, req)
        if query_len > 0:
            kv, seq_len = locate_rest(call, req, prefix, kv_head, config)
            first_tile, num_tiles = count_tiles(batch, req, True, config, ALL_KEYS)
            query_tiles = count_query_tiles(batch, req, True, config)
            attend_in_segment(
                call, segment, index, tile_index, kv, seq_len, req, start, query_len,
                first_tile, num_tiles, query_tiles, prefix, kv_head, config, plan, KEYS,
            )  # fmt: skip
            tile_index += num_tiles * query_tiles


@triton.jit(do_not_specialize=CHANGING)
def append_kernel(
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
    """Attend with all requests. Grid: (kv_heads, segments).

    Args:
        tensors, option_tensors, strides, masks, scores, scale_strides, config, plan: Tensors,
            OptionTensors, Strides, MaskArguments, ScoreArguments, ScaleStrides, Config, StreamK.
        num_search_steps: not used here.
        partial_rows: rows of a query tile, at most, for which the workspace has room.
    """
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    attend_with_requests(call, num_tokens, num_reqs, None, config, plan, WHOLE)
