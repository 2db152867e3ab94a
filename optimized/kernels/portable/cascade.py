"""Cascade kernels: attention to a prefix that all requests share, and to the keys after it.

`cascade_prefix_kernel` attends to the prefix, with the queries of all requests as the rows of one
sequence. `cascade_rest_kernel` attends to the rest of each request, and merges each finished row
with its partial results over the prefix. Both have the stream-K partition of append.py.
`cascade_short_rest_kernel` takes its place where many requests have short rests.
Source: Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade Inference", FlashInfer, 2024.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..softmax import normalize, start_softmax
from .append import PREFIX, REST, attend_in_segment, attend_with_requests, locate_rest
from .arguments import CHANGING, KernelCall
from .attention_tile import attend_to_keys, make_query_tile
from .cascade_prefix import PrefixPartials, fold_prefix
from .epilogue import clear_padding, store_rows
from .formats.cache_format import scale_values
from .load_kv import locate_kv
from .load_q import find_queries
from .options.sinks import start_with_sinks
from .stream_k import Segment, choose_length


class CascadeTensors(NamedTuple):
    """Pointers to the tensors of a cascade: those of `Tensors`, and the partial results.

    Args:
        q, k, v, block_table, query_start_loc, seq_lens, out, lse: as in `Tensors`. The prefix is
            read through row 0 of `block_table`.
        partial_out, partial_lse, semaphores: as in `Tensors`.
        prefix_out, prefix_lse: as in `PrefixPartials`.
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
    semaphores: Any
    prefix_out: Any
    prefix_lse: Any


@triton.jit
def find_prefix_segment(
    index, num_segments, num_tiles, query_tiles, MIN_TILES: tl.constexpr
):
    """Return a program's segment of the KV tiles of one sequence.

    Args:
        num_tiles, query_tiles: KV tiles per query tile, and query tiles.
    """
    total = num_tiles * query_tiles
    length = choose_length(total, query_tiles, num_tiles, num_segments, MIN_TILES)
    begin = tl.minimum(index * length, total)
    end = tl.minimum(begin + length, total)
    return Segment(0, 1, 0, begin, end, length)


@triton.jit(do_not_specialize=[*CHANGING, "prefix_len", "prefix_splits"])
def cascade_prefix_kernel(
    tensors,
    option_tensors,
    num_tokens,
    num_reqs,
    prefix_len,
    prefix_splits,
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
    """Attend to the prefix with all tokens. Grid: (kv_heads, segments).

    Rows of tokens that belong to no request are computed too, and are not used.

    Args:
        tensors: CascadeTensors; partial results are written to `prefix_out` and `prefix_lse`.
        num_reqs, prefix_splits: not used here.
        prefix_len: keys of the prefix, at least 1.
        option_tensors, strides, masks, scores, scale_strides, config, plan: as in `append_kernel`.
    """
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    num_heads = tl.num_programs(0) * config.GROUP_SIZE
    prefix = PrefixPartials(
        tensors.prefix_out, tensors.prefix_lse, prefix_len, prefix_splits, num_tokens,
        num_heads,
    )  # fmt: skip
    num_tiles = tl.cdiv(prefix_len, config.BLOCK_N)
    query_tiles = tl.cdiv(num_tokens * config.GROUP_SIZE, config.BLOCK_M)
    segment = find_prefix_segment(
        index, tl.num_programs(1), num_tiles, query_tiles, plan.MIN_TILES
    )
    kv, _ = locate_kv(call, 0, kv_head, config)
    if segment.begin < segment.end:
        attend_in_segment(
            call, segment, index, 0, kv, prefix_len, 0, 0, num_tokens, 0, num_tiles,
            query_tiles, prefix, kv_head, config, plan, PREFIX,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*CHANGING, "prefix_len", "prefix_splits"])
def cascade_rest_kernel(
    tensors,
    option_tensors,
    num_tokens,
    num_reqs,
    prefix_len,
    prefix_splits,
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
    """Attend to the keys after the prefix with all requests. Grid: (kv_heads, segments).

    The other arguments are those of `cascade_prefix_kernel`.

    Args:
        prefix_splits: partial results per row that the first launch stored.
    """
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    num_heads = tl.num_programs(0) * config.GROUP_SIZE
    prefix = PrefixPartials(
        tensors.prefix_out, tensors.prefix_lse, prefix_len, prefix_splits, num_tokens,
        num_heads,
    )  # fmt: skip
    attend_with_requests(call, num_tokens, num_reqs, prefix, config, plan, REST)


@triton.jit(do_not_specialize=[*CHANGING, "prefix_len", "prefix_splits"])
def cascade_short_rest_kernel(
    tensors,
    option_tensors,
    num_tokens,
    num_reqs,
    prefix_len,
    prefix_splits,
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
    IS_DEPENDENT: tl.constexpr,
):
    """Attend to few keys after the prefix with all requests. Grid: (kv_heads, query tiles, reqs).

    Many programs share an SM, so one reads keys while another one starts or stores. A program has
    less than half the instructions of one of `cascade_rest_kernel`, which are fetched from memory.

    The other arguments are those of `cascade_rest_kernel`.

    Args:
        IS_DEPENDENT: whether the launch may begin before the first one has ended.
    """
    kv_head = tl.program_id(0)
    query_tile = tl.program_id(1)
    req = tl.program_id(2)
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    prefix = PrefixPartials(
        tensors.prefix_out, tensors.prefix_lse, prefix_len, prefix_splits, num_tokens,
        tl.num_programs(0) * config.GROUP_SIZE,
    )  # fmt: skip
    start, query_len = find_queries(tensors.query_start_loc, req)
    first_row = query_tile * config.BLOCK_M
    if first_row < query_len * config.GROUP_SIZE:
        kv, seq_len = locate_rest(call, req, prefix, kv_head, config)
        tile = make_query_tile(
            call, kv, seq_len, req, start, query_len, first_row, kv_head, config
        )
        acc, l_i, m_i = start_softmax(config.BLOCK_M, config.BLOCK_DV)
        l_i, m_i = start_with_sinks(
            l_i, m_i, option_tensors.sinks, tile.rows.head, tile.rows.is_row, True
        )
        begin = tile.visible.begin // config.BLOCK_N * config.BLOCK_N
        acc, l_i, m_i = attend_to_keys(
            acc, l_i, m_i, call, tile, begin, tile.visible.end, config
        )
        if IS_DEPENDENT:
            tl.extra.cuda.gdc_wait()
        acc, l_i, m_i = fold_prefix(
            acc, l_i, m_i, prefix, tile.rows, True, config, config.BLOCK_M
        )
        result, lse = normalize(acc, l_i, m_i)
        result = scale_values(result, call, kv_head, config)
        store_rows(call, result, lse, tile.rows, config)
    elif IS_DEPENDENT:
        # every program waits, so that the end of this launch is the end of both
        tl.extra.cuda.gdc_wait()
    clear_padding(
        call, num_tokens, num_reqs, req * tl.num_programs(1) + query_tile,
        tl.num_programs(1) * tl.num_programs(2), kv_head, config,
    )  # fmt: skip
