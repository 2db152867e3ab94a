"""Split-KV kernels with fixed splits: batch-invariant results for requests of any length.

The keys of a sequence are cut at multiples of SPLIT_SIZE, counted from its first key. The splits
are combined in order. So a row is bitwise the same whatever else is in the batch, and whichever of
the two kernels computes it. `split_rows_kernel` computes all splits of a query tile in one program.
`split_kv_kernel` has a program per split, for batches whose query tiles do not fill the chip.
"""

import triton
import triton.language as tl

from ..softmax import normalize, start_softmax
from .arguments import CHANGING, KernelCall
from .attention_tile import attend_to_keys, load_query_tile
from .combine import arrive, combine_splits, fold_partial, split_offset, store_partial
from .epilogue import clear_padding, store_rows
from .formats.cache_format import scale_values
from .load_q import find_queries
from .options.sinks import start_with_sinks
from .prefill import find_request


@triton.jit
def count_splits(visible, config: tl.constexpr, SPLIT_SIZE: tl.constexpr):
    """Return the first key of a query tile's first KV tile, its first split, and their number."""
    begin = visible.begin // config.BLOCK_N * config.BLOCK_N
    first_split = begin // SPLIT_SIZE
    num_splits = tl.maximum(tl.cdiv(visible.end, SPLIT_SIZE) - first_split, 1)
    return begin, first_split, num_splits


@triton.jit
def attend_to_splits(
    call, tile, begin, first_split, split, end_split, counts_sink, kv_head,
    config: tl.constexpr, SPLIT_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the rows of a query tile and their log-sum-exp, over some splits of their keys.

    Args:
        begin: first key of the tile's first KV tile.
        first_split: index of the tile's first split in the sequence.
        split, end_split: the splits to attend to, counted from the first.
        counts_sink: whether the result is final, and so counts the sinks.
    """
    acc, l_i, m_i = start_softmax(config.BLOCK_M, config.BLOCK_DV)
    l_i, m_i = start_with_sinks(
        l_i, m_i, call.option_tensors.sinks, tile.rows.head, tile.rows.is_row,
        counts_sink,
    )  # fmt: skip
    for own in range(split, end_split):
        split_begin = (first_split + own) * SPLIT_SIZE
        split_acc, split_l, split_m = start_softmax(config.BLOCK_M, config.BLOCK_DV)
        split_acc, split_l, split_m = attend_to_keys(
            split_acc, split_l, split_m, call, tile, tl.maximum(begin, split_begin),
            tl.minimum(tile.visible.end, split_begin + SPLIT_SIZE), config,
        )  # fmt: skip
        result, lse = normalize(split_acc, split_l, split_m)
        result = scale_values(result, call, kv_head, config)
        acc, l_i, m_i = fold_partial(acc, l_i, m_i, result, lse)
    return normalize(acc, l_i, m_i)


@triton.jit
def assign_splits(split, num_splits):
    """Return the end of this program's splits, and how many programs have some.

    The last program takes the rest of a sequence that is longer than it was said to be.

    Args:
        split: the program's first one.
        num_splits: splits of the query tile.
    """
    last_split = tl.num_programs(2) - 1
    end_split = tl.where(split < last_split, split + 1, num_splits)
    end_split = tl.minimum(end_split, num_splits)
    return end_split, tl.minimum(num_splits, last_split + 1)


@triton.jit
def store_split(
    call, result, lse, is_row, start, query_len, first_row, index, split, num_splits,
    kv_head, config: tl.constexpr, COMBINE_ROWS: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a query tile that several programs share.

    The program that arrives last combines the partial results of all of them.

    Args:
        result, lse, is_row: [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M].
        start, query_len: first token of the request in the batch, and how many it has.
        first_row, index: the tile's first row in the request, and its index in the grid.
        split, num_splits: this program's split, and how many programs share the tile.
    """
    num_kv_heads = tl.num_programs(1)
    offset = split_offset(
        index, kv_head, num_kv_heads, split, tl.num_programs(2), call.partial_rows
    )
    store_partial(call, offset, result, lse, is_row, config)
    semaphore = call.tensors.semaphores + index * num_kv_heads + kv_head
    if arrive(semaphore, num_splits):
        tl.store(semaphore, 0)  # for the next launch
        combine_splits(
            call, start, query_len, first_row, index, num_splits, kv_head, num_kv_heads,
            config, COMBINE_ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def split_rows_kernel(
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
    SPLIT_SIZE: tl.constexpr,
):
    """Attend with all requests, one program per query tile. Grid: (query tiles, kv_heads).

    Args:
        As in `prefill_kernel`, and SPLIT_SIZE: keys per split, a multiple of BLOCK_N.
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
        if first_row < query_len * config.GROUP_SIZE:
            tile = load_query_tile(
                call, req, start, query_len, first_row, kv_head, config
            )
            begin, first_split, num_splits = count_splits(
                tile.visible, config, SPLIT_SIZE
            )
            result, lse = attend_to_splits(
                call, tile, begin, first_split, 0, num_splits, True, kv_head,
                config, SPLIT_SIZE,
            )  # fmt: skip
            store_rows(call, result, lse, tile.rows, config)


@triton.jit(do_not_specialize=CHANGING)
def split_kv_kernel(
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
    SPLIT_SIZE: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
):
    """Attend with all requests, one program per split. Grid: (query tiles, kv_heads, splits).

    Args:
        As in `split_rows_kernel`, and COMBINE_ROWS: rows that are combined at once.
        partial_rows: rows of a query tile, at most, for which the workspace has room.
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
        if first_row < query_len * config.GROUP_SIZE:
            tile = load_query_tile(
                call, req, start, query_len, first_row, kv_head, config
            )
            begin, first_split, num_splits = count_splits(
                tile.visible, config, SPLIT_SIZE
            )
            split = tl.program_id(2)
            end_split, num_splits = assign_splits(split, num_splits)
            is_whole = (num_splits == 1) & (split == 0)
            result, lse = attend_to_splits(
                call, tile, begin, first_split, split, end_split, is_whole, kv_head,
                config, SPLIT_SIZE,
            )  # fmt: skip
            if is_whole:
                store_rows(call, result, lse, tile.rows, config)
            elif split < num_splits:
                store_split(
                    call, result, lse, tile.rows.is_row, start, query_len, first_row,
                    index, split, num_splits, kv_head, config, COMBINE_ROWS,
                )  # fmt: skip
