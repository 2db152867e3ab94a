"""Decode kernel of few requests: the programs per request are fixed before the launch.

Such a launch takes microseconds. It waits for one access to memory after another, and most of the
chip is idle. So the index of a program gives its request and its split, and no program counts the
tiles of other requests, as those of decode.py do. The keys of each request are divided evenly among
its programs, whatever its length. The bounds of the batch decide only how many programs there are.
"""

import triton
import triton.language as tl

from .arguments import CHANGING, KernelCall
from .attention_tile import attend_with_tile, make_query_tile
from .combine import arrive, combine_segments, segment_offset, store_partial
from .epilogue import clear_tokens, store_rows
from .load_kv import locate_kv
from .load_q import find_queries


@triton.jit
def keys_in_split(visible, split, num_programs, config: tl.constexpr):
    """Return the keys of a request that are in a split, and how many splits the request has.

    All splits but the last have the same number of KV tiles. Tiles are counted from the first one
    with a visible key.

    Args:
        visible: VisibleKeys.
        split, num_programs: this program's split, and the programs per request.

    Returns:
        begin, end: of the keys; a multiple of BLOCK_N, and any index.
        num_splits: from 1, so that some program stores the rows of a request without keys, to
            `num_programs`.
    """
    first = visible.begin // config.BLOCK_N * config.BLOCK_N
    num_tiles = tl.maximum(tl.cdiv(visible.end - first, config.BLOCK_N), 1)
    split_tiles = tl.cdiv(num_tiles, num_programs)
    num_splits = tl.cdiv(num_tiles, split_tiles)
    begin = first + split * split_tiles * config.BLOCK_N
    end = tl.minimum(begin + split_tiles * config.BLOCK_N, visible.end)
    return begin, end, num_splits


@triton.jit
def store_split(
    call, req, split, num_splits, start, query_len, result, lse, is_row, part,
    config: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a split. The last program to arrive combines all of them.

    Args:
        req, split, num_splits: the request, this program's split, and how many there are.
        start, query_len: first token of the request in the batch, and how many it has.
        result, lse, is_row: [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M].
        part: part of the query heads, of GROUP_SIZE.
    """
    num_parts = tl.num_programs(0)
    # the splits of a request are numbered as segments, of which the first one begins in itself
    first = req * tl.num_programs(1)
    offset = segment_offset(
        first + split, (split == 0).to(tl.int32), part, num_parts, call.partial_rows
    )  # fmt: skip
    store_partial(call, offset, result, lse, is_row, config)
    semaphore = call.tensors.semaphores + req * num_parts + part
    if arrive(semaphore, num_splits):
        tl.store(semaphore, 0)  # for the next launch
        combine_segments(
            call, start, query_len, first, first + num_splits - 1, part, num_parts,
            config, plan.COMBINE_ROWS, plan.COMBINE_SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def short_decode_kernel(
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
    """Attend with all requests of at most `decode_rows` rows. Grid: (parts, splits, reqs).

    A part is GROUP_SIZE query heads. Those of a kv head are one part, or PARTS: then each of them
    reads the keys, mostly from the L2 cache, and has a smaller result to combine.

    Args:
        As in `decode_kernel`, and plan: ShortDecode. The rows of no request are always cleared.
    """
    part = tl.program_id(0)
    kv_head = part // plan.PARTS
    split = tl.program_id(1)
    req = tl.program_id(2)
    num_programs = tl.num_programs(1)
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    # all lengths are loaded before any of them is waited for
    start, query_len = find_queries(tensors.query_start_loc, req)
    kv, seq_len = locate_kv(call, req, kv_head, config)
    first_padding = tl.load(tensors.query_start_loc + num_reqs)
    num_rows = query_len * config.GROUP_SIZE
    if (num_rows <= decode_rows) & (num_rows > 0):
        tile = make_query_tile(
            call, kv, seq_len, req, start, query_len, 0, part, config
        )
        begin, end, num_splits = keys_in_split(
            tile.visible, split, num_programs, config
        )
        if split < num_splits:
            is_whole = num_splits == 1
            result, lse = attend_with_tile(
                call, tile, begin, end, is_whole, kv_head, config
            )
            if is_whole:
                store_rows(call, result, lse, tile.rows, config)
            else:
                store_split(
                    call, req, split, num_splits, start, query_len,
                    result, lse, tile.rows.is_row, part, config, plan,
                )  # fmt: skip
    clear_tokens(
        call, first_padding + req * num_programs + split, num_tokens,
        num_programs * tl.num_programs(2), part, config, 16,
    )  # fmt: skip
