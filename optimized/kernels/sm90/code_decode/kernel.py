"""Entry of the Hopper FP8 decode kernel: the decode kernel's work, with products in registers.

The arguments, the stream-K partition and the workspace are those of portable/decode.py. Keys and
values go from global memory to the registers of tensor-core operands, and are decoded to float16
there. So no number passes through shared memory, which limits the portable kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...portable.arguments import CHANGING, KernelCall
from ...portable.combine import arrive, segment_offset, store_partial_columns
from ...portable.decode import keys_in_segment
from ...portable.epilogue import store_columns
from ...portable.load_kv import locate_kv
from ...portable.load_q import QueryRows, find_queries, number_rows
from ...portable.options.sinks import start_with_sinks
from ...portable.stream_k import Batch, count_tiles, find_segment_in_lanes
from ...softmax import finite, normalize
from ..common.pipeline import allocate_barriers
from .config import partials_layout, requests_layout, rows_layout
from .tile import attend, make_tile


@gluon.jit
def _combine(
    call, start, query_len, first, last, kv_head, num_kv_heads,
    config: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """Store a request's rows, combined from segments `first` to `last`.

    portable/combine.py does the same.
    """
    ROWS: gl.constexpr = plan.COMBINE_ROWS
    SPLITS: gl.constexpr = plan.COMBINE_SPLITS
    layout: gl.constexpr = partials_layout(gl.num_warps(), ROWS)
    of_lse: gl.constexpr = gl.SliceLayout(2, layout)
    of_acc: gl.constexpr = gl.SliceLayout(0, layout)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_acc)
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, of_lse))
    in_tile = gl.arange(0, ROWS, gl.SliceLayout(0, of_lse))
    column = gl.arange(0, config.BLOCK_DV, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
    num_rows = gl.minimum(rows.num_rows, call.partial_rows)
    acc = gl.full([ROWS, config.BLOCK_DV], 0.0, gl.float32, of_acc)
    l_i = gl.full([ROWS], 0.0, gl.float32, in_tile.type.layout)
    m_i = gl.full([ROWS], -float("inf"), gl.float32, in_tile.type.layout)
    l_i, m_i = start_with_sinks(
        l_i, m_i, call.option_tensors.sinks, rows.head, in_tile < num_rows, True
    )
    for begin in range(first, last + 1, SPLITS):
        segment = begin + split
        begins_here = (segment == first).to(gl.int32)
        offset = segment_offset(
            segment, begins_here, kv_head, num_kv_heads, call.partial_rows
        )
        offset = offset[:, None] + in_tile[None, :]  # [SPLITS, ROWS]
        is_partial = (segment <= last)[:, None] & (in_tile < num_rows)[None, :]
        # other programs stored these, so they are not loaded from this one's L1 cache
        lse = gl.load(
            call.tensors.partial_lse + offset,
            mask=is_partial,
            other=-float("inf"),
            cache_modifier=".cg",
        )
        # [SPLITS, ROWS, BLOCK_DV]
        results = gl.load(
            call.tensors.partial_out
            + (offset * config.V_HEAD_DIM)[:, :, None]
            + column[None, None, :],
            mask=is_partial[:, :, None] & (column >= 0)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = gl.maximum(m_i, gl.max(lse, 0))
        shift = finite(m_new)
        alpha = gl.exp2(m_i - shift)
        weights = gl.exp2(lse - shift[None, :])
        l_i = l_i * alpha + gl.sum(weights, 0)
        m_i = m_new
        acc = acc * gl.convert_layout(alpha, of_rows)[:, None]
        acc += gl.sum(results * weights[:, :, None], 0)
    result, lse = normalize(
        acc, gl.convert_layout(l_i, of_rows), gl.convert_layout(m_i, of_rows)
    )
    in_tile = gl.arange(0, ROWS, of_rows)
    rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
    rows = QueryRows(
        query_len, 0, num_rows, rows.token, rows.token_index, rows.head,
        in_tile < num_rows,
    )  # fmt: skip
    column = gl.arange(0, config.BLOCK_DV, gl.SliceLayout(0, of_acc))
    store_columns(call, result, lse, rows, column, config)


@gluon.jit
def _store_split_request(
    call, segment, index, tile_index, num_tiles, start, query_len, result, lse, rows,
    kv_head, num_kv_heads, config: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """Store the partial result of a request that spans several segments.

    portable/decode.py does the same.
    """
    begins_here = (tile_index >= segment.begin).to(gl.int32)
    offset = segment_offset(
        index, begins_here, kv_head, num_kv_heads, call.partial_rows
    )
    layout: gl.constexpr = result.type.layout
    in_tile = gl.arange(0, config.BLOCK_M, gl.SliceLayout(1, layout))
    column = gl.arange(0, config.BLOCK_DV, gl.SliceLayout(0, layout))
    store_partial_columns(
        call, offset, result, lse, rows.is_row, in_tile, column, config
    )
    first = tile_index // segment.length
    last = (tile_index + num_tiles - 1) // segment.length
    semaphore = call.tensors.semaphores + first * num_kv_heads + kv_head
    if arrive(semaphore, last - first + 1):
        gl.store(semaphore, 0)  # for the next launch
        _combine(
            call, start, query_len, first, last, kv_head, num_kv_heads, config, plan
        )


@gluon.jit
def _clear_padding(
    call, num_tokens, num_reqs, index, num_programs, kv_head, config: gl.constexpr
):
    """Store this program's share of the rows of no request: 0, and a log-sum-exp of -inf."""
    layout: gl.constexpr = rows_layout(gl.num_warps())
    in_tile = gl.arange(0, config.BLOCK_M, gl.SliceLayout(1, layout))
    column = gl.arange(0, config.BLOCK_DV, gl.SliceLayout(0, layout))
    zeros = gl.full([config.BLOCK_M, config.BLOCK_DV], 0.0, gl.float32, layout)
    empty = gl.full(
        [config.BLOCK_M], -float("inf"), gl.float32, gl.SliceLayout(1, layout)
    )
    first = gl.load(call.tensors.query_start_loc + num_reqs) + index
    for token in range(first, num_tokens, num_programs):
        # the heads of one token
        rows = number_rows(token, 1, 0, in_tile, kv_head, config)
        store_columns(call, zeros, empty, rows, column, config)


# It is specialized as the decode kernel is, since a launcher calls either of them.
@gluon.jit(do_not_specialize=CHANGING)
def code_decode_kernel(
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
    config: gl.constexpr,
    plan: gl.constexpr,
):
    """Attend with all requests of at most `decode_rows` rows. Grid: (kv_heads, segments).

    The arguments are those of portable/decode.py. Keys and values begin at multiples of 16 bytes.
    """
    kv_head = gl.program_id(0)
    num_kv_heads = gl.num_programs(0)
    index = gl.program_id(1)
    call = KernelCall(
        tensors, strides, option_tensors, masks, scores, scale_strides, scale, partial_rows,
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width,
    )  # fmt: skip
    batch = Batch(
        tensors.query_start_loc, tensors.seq_lens, masks.causal, num_reqs, decode_rows,
        None, 1,
    )  # fmt: skip
    lanes = gl.arange(
        0, plan.REQS_PER_PASS, requests_layout(gl.num_warps(), plan.REQS_PER_PASS)
    )
    segment = find_segment_in_lanes(
        index, gl.num_programs(1), batch, lanes, config, plan, False
    )
    never = allocate_barriers(1)
    mbarrier.init(never.index(0), count=1)
    _clear_padding(
        call, num_tokens, num_reqs, index, gl.num_programs(1), kv_head, config
    )
    tile_index = segment.first_tile
    for req in range(segment.first_req, segment.end_req):
        start, query_len = find_queries(tensors.query_start_loc, req)
        num_rows = query_len * config.GROUP_SIZE
        if (num_rows <= decode_rows) & (num_rows > 0):
            kv, seq_len = locate_kv(call, req, kv_head, config)
            tile = make_tile(call, kv, seq_len, req, start, query_len, kv_head, config)
            first_tile, num_tiles = count_tiles(batch, req, True, config, False)
            begin, end, is_whole = keys_in_segment(
                segment, tile_index, first_tile, num_tiles, tile.visible, config
            )
            result, lse, rows = attend(
                call, tile, start, query_len, begin, end, is_whole, kv_head, never,
                config,
            )  # fmt: skip
            if is_whole:
                column = gl.arange(
                    0, config.BLOCK_DV, gl.SliceLayout(0, result.type.layout)
                )
                store_columns(call, result, lse, rows, column, config)
            else:
                _store_split_request(
                    call, segment, index, tile_index, num_tiles, start, query_len,
                    result, lse, rows, kv_head, num_kv_heads, config, plan,
                )  # fmt: skip
            tile_index += num_tiles
