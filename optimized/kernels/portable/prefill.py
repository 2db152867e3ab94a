"""Prefill kernel: requests with more rows than a decode tile has, one query tile per program.

Each program attends with BLOCK_M rows of one kv head of one request to all their visible keys.
Requests with fewer rows are skipped; decode.py computes them. Where results must not depend on the
batch, split_kv.py computes all requests.
"""

import triton
import triton.language as tl

from .arguments import CHANGING, KernelCall
from .attention_tile import attend_with_tile, load_query_tile
from .epilogue import clear_padding, store_rows
from .load_q import find_queries


@triton.jit
def find_tile(
    query_start_loc, tile, num_reqs, num_search_steps,
    GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the request of a query tile, and the tile's first row in it.

    The tiles of request r begin at query_start_loc[r] * GROUP_SIZE // BLOCK_M + r, which gives each
    request room for one tile that is not full. The request is found by binary search.
    """
    low = 0
    high = num_reqs
    for _ in range(num_search_steps):
        middle = (low + high) // 2
        search = low < high
        start = tl.load(query_start_loc + middle + 1, mask=search, other=0)
        tiles_begin = start * GROUP_SIZE // BLOCK_M + middle + 1
        low = tl.where(search & (tiles_begin <= tile), middle + 1, low)
        high = tl.where(search & (tiles_begin > tile), middle, high)
    start = tl.load(query_start_loc + low)
    return low, (tile - start * GROUP_SIZE // BLOCK_M - low) * BLOCK_M


@triton.jit
def find_request(query_start_loc, num_reqs, num_search_steps, config: tl.constexpr):
    """Return the request of this program's query tile, and the tile's first row in it.

    Returns:
        first_req, end_req: one request, or none if this program has no tile.
        first_row: the tile's first row.
    """
    # the longest tiles, which are the last ones of a causal request, start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    req, first_row = find_tile(
        query_start_loc, tile, num_reqs, num_search_steps,
        config.GROUP_SIZE, config.BLOCK_M,
    )  # fmt: skip
    return req, tl.minimum(req + 1, num_reqs), first_row


@triton.jit(do_not_specialize=CHANGING)
def prefill_kernel(
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
):
    """Attend with all requests of more than `decode_rows` rows. Grid: (query tiles, kv_heads).

    Args:
        tensors, option_tensors, strides, masks, scores, scale_strides, config: Tensors,
            OptionTensors, Strides, MaskArguments, ScoreArguments, ScaleStrides, Config.
        num_search_steps: steps of the binary search for a tile's request.
        partial_rows: not used here.
    """
    kv_head = tl.program_id(1)
    index = tl.program_id(0)
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    first_req, end_req, first_row = find_request(
        tensors.query_start_loc, num_reqs, num_search_steps, config
    )
    clear_padding(
        call, num_tokens, num_reqs, index, tl.num_programs(0), kv_head, config
    )
    for req in range(first_req, end_req):
        start, query_len = find_queries(tensors.query_start_loc, req)
        num_rows = query_len * config.GROUP_SIZE
        if (num_rows > decode_rows) & (first_row < num_rows):
            tile = load_query_tile(
                call, req, start, query_len, first_row, kv_head, config
            )
            begin = tile.visible.begin // config.BLOCK_N * config.BLOCK_N
            result, lse = attend_with_tile(
                call, tile, begin, tile.visible.end, True, kv_head, config
            )
            store_rows(call, result, lse, tile.rows, config)
