"""Decode kernel: requests whose rows fit one small tile, in a stream-K partition of their keys.

Decodes and short verifications are memory bound. Each program processes one segment of the
concatenated KV tiles of all such requests (stream_k.py), for one kv head. Requests with more rows
are skipped; prefill.py computes them.
"""

import triton
import triton.language as tl

from .arguments import CHANGING, KernelCall
from .attention_tile import attend_with_tile, load_query_tile
from .combine import arrive, combine_segments, segment_offset, store_partial
from .epilogue import clear_padding, store_rows
from .load_q import find_queries
from .stream_k import Batch, count_tiles, find_segment


@triton.jit
def keys_in_segment(
    segment, tile_index, first_tile, num_tiles, visible, config: tl.constexpr
):
    """Return the keys of a request that are in a segment.

    Args:
        tile_index: index of the request's first KV tile among all tiles.
        first_tile, num_tiles: that tile's index in the sequence, and how many tiles there are.
        visible: VisibleKeys.

    Returns:
        begin, end: of the keys; a multiple of BLOCK_N, and any index.
        is_whole: whether all tiles of the request are in the segment.
    """
    is_whole = tile_index >= segment.begin
    is_whole &= tile_index + num_tiles <= segment.end
    begin = visible.begin // config.BLOCK_N * config.BLOCK_N
    own = first_tile + tl.maximum(segment.begin - tile_index, 0)
    begin = tl.maximum(begin, own * config.BLOCK_N)
    own_end = first_tile + segment.end - tile_index
    end = tl.minimum(visible.end, own_end * config.BLOCK_N)
    return begin, end, is_whole


@triton.jit
def store_split_request(
    call, segment, index, tile_index, num_tiles, start, query_len,
    result, lse, is_row, kv_head, num_kv_heads,
    config: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a request that spans several segments.

    The program that arrives last combines the partial results of all segments.

    Args:
        segment, index: this program's segment.
        tile_index, num_tiles: first of the request's KV tiles, and how many it has.
        start, query_len: first token of the request in the batch, and how many it has.
        result, lse, is_row: [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M].
    """
    begins_here = (tile_index >= segment.begin).to(tl.int32)
    offset = segment_offset(
        index, begins_here, kv_head, num_kv_heads, call.partial_rows
    )
    store_partial(call, offset, result, lse, is_row, config)
    first = tile_index // segment.length
    last = (tile_index + num_tiles - 1) // segment.length
    semaphore = call.tensors.semaphores + first * num_kv_heads + kv_head
    if arrive(semaphore, last - first + 1):
        tl.store(semaphore, 0)  # for the next launch
        combine_segments(
            call, start, query_len, first, last, kv_head, num_kv_heads,
            config, plan.COMBINE_ROWS, plan.COMBINE_SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def decode_kernel(
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
    decode_rows,
    config: tl.constexpr,
    plan: tl.constexpr,
):
    """Attend with all requests of at most `decode_rows` rows. Grid: (kv_heads, segments).

    Args:
        tensors, option_tensors, strides, masks, scores, scale_strides, config, plan: Tensors,
            OptionTensors, Strides, MaskArguments, ScoreArguments, ScaleStrides, Config, StreamK.
        num_search_steps: not used here.
        partial_rows: rows of a request, at most, for which the workspace has room.
    """
    # the kv heads of a segment run at the same time, as their keys are stored in the same blocks
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    index = tl.program_id(1)
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    batch = Batch(
        tensors.query_start_loc, tensors.seq_lens, masks.causal, num_reqs, decode_rows,
        None, 1,
    )  # fmt: skip
    ALL_KEYS: tl.constexpr = masks.tree is not None or masks.query_ranges is not None
    segment = find_segment(index, tl.num_programs(1), batch, config, plan, ALL_KEYS)
    clear_padding(
        call, num_tokens, num_reqs, index, tl.num_programs(1), kv_head, config
    )
    tile_index = segment.first_tile
    for req in range(segment.first_req, segment.end_req):
        start, query_len = find_queries(tensors.query_start_loc, req)
        num_rows = query_len * config.GROUP_SIZE
        if (num_rows <= decode_rows) & (num_rows > 0):
            tile = load_query_tile(call, req, start, query_len, 0, kv_head, config)
            first_tile, num_tiles = count_tiles(batch, req, True, config, ALL_KEYS)
            begin, end, is_whole = keys_in_segment(
                segment, tile_index, first_tile, num_tiles, tile.visible, config
            )
            result, lse = attend_with_tile(
                call, tile, begin, end, is_whole, kv_head, config
            )
            if is_whole:
                store_rows(call, result, lse, tile.rows, config)
            else:
                store_split_request(
                    call, segment, index, tile_index, num_tiles, start, query_len,
                    result, lse, tile.rows.is_row, kv_head, num_kv_heads, config, plan,
                )  # fmt: skip
            tile_index += num_tiles
