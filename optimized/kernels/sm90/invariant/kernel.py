"""Entries of the batch-invariant Hopper kernels: attention, and the fold of shared splits.

The first has the roles of the prefill kernel (`..kernel`) and computes requests of any length. A
query tile has all query heads of a KV head, so a decode reads its keys once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import WARPGROUP_M
from ..common.score import ScoreArgs, softmax_scale
from ..prefill.kernel import allocate, run_roles
from ..prefill.producer import TmaTensor, produce_v
from ..prefill.scheduler import BatchArgs
from .consumer import consume_splits
from .fold import fold, normalize_state
from .producer import produce_q_and_k
from .rows import OutputArgs, count_live_tokens, locate_states, store_lse, store_rows

# numbers that change from call to call, and must not make a specialization each
NUMBERS = [
    "num_reqs",
    "num_tokens",
    "num_heads",
    "group_size",
    "num_splits",
    "k_block_rows",
    "k_head_rows",
    "k_head_columns",
    "v_block_rows",
    "v_head_rows",
    "v_head_columns",
    "out_stride_token",
    "out_stride_head",
    "lse_stride_head",
    "lse_stride_token",
    "block_table_stride",
    "num_programs",
]
POINTERS = [
    "out",
    "lse",
    "states",
    "block_table",
    "query_start_loc",
    "kv_lens",
    "work_counter",
    "sinks",
]
ROWS = gl.constexpr(8)
"""Rows that a program of the second kernel folds."""


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def invariant_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    lse,
    states,
    block_table,
    query_start_loc,
    kv_lens,
    work_counter,
    sinks,
    scale_log2,
    num_reqs,
    num_tokens,
    num_heads,
    group_size,
    num_splits,
    k_block_rows,
    k_head_rows,
    k_head_columns,
    v_block_rows,
    v_head_rows,
    v_head_columns,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    block_table_stride,
    config: gl.constexpr,
):
    """Compute the attention of all requests, and clear the rows of no request.

    Args:
        q_desc, out_desc: tensor maps, with boxes of tokens, heads and columns.
        k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        out, lse, states, num_tokens, num_heads, group_size: `OutputArgs`.
        block_table, query_start_loc, kv_lens, num_reqs: `BatchArgs`.
        work_counter: [2] int32, 0 before and after the launch.
        sinks, scale_log2: `ScoreArgs`.
        num_splits: work items that share a query tile. If there are several, they store states,
            which `fold_kernel` folds.
        config: `Config`.
    """
    # a work item is of one KV head and split
    batch = BatchArgs(
        block_table,
        block_table_stride,
        query_start_loc,
        kv_lens,
        num_reqs,
        num_heads // group_size * num_splits,
        1,
        0,
    )
    k = TmaTensor(k_desc, k_block_rows, k_head_rows, k_head_columns)
    v = TmaTensor(v_desc, v_block_rows, v_head_rows, v_head_columns)
    output = OutputArgs(
        out_desc,
        out,
        lse,
        states,
        query_start_loc,
        num_reqs,
        num_tokens,
        num_heads,
        num_splits,
        group_size,
        out_stride_token,
        out_stride_head,
        lse_stride_token,
        lse_stride_head,
    )
    score = ScoreArgs(scale_log2, sinks)
    shared = allocate(
        k_desc.dtype,
        k_desc.block_type.shape[0],
        v_desc.block_type.shape[0],
        config,
    )
    run_roles(
        consume_splits, output, score, produce_q_and_k,
        (shared, batch, q_desc, k, output, work_counter, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def fold_kernel(
    out,
    lse,
    states,
    query_start_loc,
    sinks,
    scale_log2,
    num_reqs,
    num_tokens,
    num_heads,
    num_splits,
    num_programs,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    config: gl.constexpr,
):
    """Fold the states of shared splits, from the last to the first, and store the results.

    Grid: groups of ROWS rows.

    Args:
        num_programs: programs of `invariant_kernel`.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    KEPT: gl.constexpr = config.CONSUMERS * WARPGROUP_M * HEAD_DIM
    output = OutputArgs(
        # rows are stored one by one
        out,
        out,
        lse,
        states,
        query_start_loc,
        num_reqs,
        num_tokens,
        num_heads,
        num_splits,
        1,
        out_stride_token,
        out_stride_head,
        lse_stride_token,
        lse_stride_head,
    )
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, OF_ROWS)  # [ROWS]
    token = row // num_heads
    head = row % num_heads
    is_row = token < count_live_tokens(output)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT)
    m_i = gl.full([ROWS], -float("inf"), gl.float32, OF_ROWS)
    l_i = gl.full([ROWS], 0.0, gl.float32, OF_ROWS)
    scale = softmax_scale(scale_log2, config)
    for i in range(num_splits):
        accs, maxima, sums = locate_states(
            output, num_splits - 1 - i, token, head, num_programs * KEPT, LAYOUT, config
        )
        split_acc = gl.load(accs, mask=gl.expand_dims(is_row, 1), other=0.0)
        split_m = gl.load(maxima, mask=is_row, other=-float("inf"))
        split_l = gl.load(sums, mask=is_row, other=0.0)
        acc, m_i, l_i = fold(acc, m_i, l_i, split_acc, split_m, split_l, scale)
    sink = None
    if sinks is not None:
        sink = gl.load(sinks + head, mask=is_row, other=0.0)
    result, row_lse = normalize_state(acc, m_i, l_i, scale, sink)
    store_rows(output, result, token, head, is_row, config)
    store_lse(output, row_lse, token, head, is_row)
