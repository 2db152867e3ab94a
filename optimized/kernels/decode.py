"""Decode kernel: requests whose rows fit one small tile, in a stream-K partition of their keys.

Decodes and short verifications are memory bound. Each program processes one segment of the
concatenated KV tiles of all such requests (stream_k.py), for one kv head. Requests with more rows
are skipped; prefill.py computes them.
"""

import triton
import triton.language as tl

from .arguments import CHANGING, group_arguments
from .attention_tile import attend_to_keys, load_query_tile
from .combine import arrive, combine_segments, segment_offset, store_partial
from .epilogue import clear_padding, scale_values, store_rows
from .options.sinks import start_with_sinks
from .softmax import normalize, start_softmax
from .stream_k import Batch, count_tiles, find_segment, find_segment_of_many


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
    options,
    tree_stride_req,
    tree_width,
    decode_rows,
    config: tl.constexpr,
    plan: tl.constexpr,
):
    """Attend with all requests of at most `decode_rows` rows. Grid: (kv_heads, segments).

    Args:
        tensors, option_tensors, strides, options, config, plan: Tensors, OptionTensors, Strides,
            OptionArguments, Config, StreamK.
        num_search_steps: not used here.
        partial_rows: rows of a request, at most, for which the workspace has room.
    """
    # the kv heads of a segment run at the same time, as their keys are stored in the same blocks
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    index = tl.program_id(1)
    call, output = group_arguments(
        tensors, option_tensors, strides, options, scale, table_stride_req,
        lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    batch = Batch(
        tensors.query_start_loc, tensors.seq_lens, options.causal, num_reqs, decode_rows
    )
    ALL_KEYS: tl.constexpr = (
        options.tree is not None or options.query_ranges is not None
    )
    if plan.MANY_REQS:
        segment = find_segment_of_many(
            index, tl.num_programs(1), batch, config, plan, ALL_KEYS
        )
    else:
        segment = find_segment(index, tl.num_programs(1), batch, config, plan, ALL_KEYS)
    if config.CLEAR_PADDING:
        first_padding = tl.load(tensors.query_start_loc + num_reqs) + index
        clear_padding(
            output, first_padding, num_tokens, tl.num_programs(1), kv_head, config, 16
        )
    tile_index = segment.first_tile
    for req in range(segment.first_req, segment.end_req):
        start = tl.load(tensors.query_start_loc + req)
        query_len = tl.load(tensors.query_start_loc + req + 1) - start
        num_rows = query_len * config.GROUP_SIZE
        if (num_rows <= decode_rows) & (num_rows > 0):
            tile = load_query_tile(call, req, start, query_len, 0, kv_head, config)
            first_tile, num_tiles = count_tiles(batch, req, True, config, ALL_KEYS)
            # the keys of this segment
            is_whole = tile_index >= segment.begin
            is_whole &= tile_index + num_tiles <= segment.end
            begin = tile.visible.begin // config.BLOCK_N * config.BLOCK_N
            own = first_tile + tl.maximum(segment.begin - tile_index, 0)
            begin = tl.maximum(begin, own * config.BLOCK_N)
            own_end = first_tile + segment.end - tile_index
            end = tl.minimum(tile.visible.end, own_end * config.BLOCK_N)

            acc, l_i, m_i = start_softmax(config.BLOCK_M, config.BLOCK_DV)
            l_i, m_i = start_with_sinks(
                l_i, m_i, option_tensors.sinks, tile.rows.head, tile.rows.is_row,
                is_whole,
            )  # fmt: skip
            acc, l_i, m_i = attend_to_keys(acc, l_i, m_i, tile, begin, end, config)
            result, lse = normalize(acc, l_i, m_i)
            result = scale_values(result, call, kv_head, config.CACHE_FP8)
            if is_whole:
                store_rows(output, result, lse, tile.rows, config)
            else:
                begins_here = (tile_index >= segment.begin).to(tl.int32)
                offset = segment_offset(
                    index, begins_here, kv_head, num_kv_heads, partial_rows
                )
                store_partial(tensors, offset, result, lse, tile.rows.is_row, config)
                first = tile_index // segment.length
                last = (tile_index + num_tiles - 1) // segment.length
                semaphore = tensors.semaphores + first * num_kv_heads + kv_head
                if arrive(semaphore, last - first + 1):
                    tl.store(semaphore, 0)  # for the next launch
                    combine_segments(
                        tensors, output, option_tensors.sinks, start, query_len,
                        first, last, kv_head, num_kv_heads, partial_rows,
                        config, plan.COMBINE_ROWS, plan.COMBINE_SPLITS,
                    )  # fmt: skip
            tile_index += num_tiles
