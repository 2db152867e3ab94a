"""Entries of the batch-invariant Hopper kernels: attention, and the fold of shared splits.

The first computes requests of any length. A query tile has all query heads of a KV head, so a
decode reads its keys once.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import WARPGROUP_M
from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.load_kv import TmaTensor, locate_kv
from ..common.roles import Loads, produce_q_and_k, produce_v, run_roles
from ..common.scheduler import BatchArgs
from ..common.score import ScoreArgs, softmax_scale
from ..common.storage import allocate
from .consumer import consume_splits
from .fold import fold, normalize_state
from .rows import (
    count_live_tokens,
    locate_states,
    store_lse,
    store_rows,
)
from .scheduler import locate_split

ROWS = gl.constexpr(8)
"""Rows that a program of the second kernel folds."""


class InvariantArguments(NamedTuple):
    """The arguments of `invariant_kernel`, in their order.

    Args:
        q_desc, out_desc: tensor maps, with boxes of tokens, heads and columns.
        k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        out: [tokens, heads, HEAD_SIZE], in the dtype of the queries.
        lse: [heads, tokens], or None.
        states: [splits, tokens, heads, HEAD_DIM] accumulators of splits that programs share, and
            after them [splits, tokens, heads] maxima and as many sums. Before them
            [programs, consumers, WARPGROUP_M, HEAD_DIM], where each warpgroup keeps its own.
        num_tokens: tokens with those of no request.
        num_heads, group_size: query heads, and query heads per KV head.
        block_table, query_start_loc, kv_lens, num_reqs: `BatchArgs`.
        work_counter: [2] int32, 0 before and after the launch.
        sinks, scale_log2: `ScoreArgs`.
        num_splits: work items that share a query tile. If there are several, they store states,
            which `fold_kernel` folds.
    """

    q_desc: TensorMap
    k_desc: TensorMap
    v_desc: TensorMap
    out_desc: TensorMap
    out: Pointer
    lse: Pointer
    states: Pointer
    block_table: Pointer
    query_start_loc: Pointer
    kv_lens: Pointer
    work_counter: Pointer
    sinks: Option
    scale_log2: Option
    num_reqs: Number
    num_tokens: Number
    num_heads: Number
    group_size: Number
    num_splits: Number
    k_block_rows: Number
    k_head_rows: Number
    k_head_columns: Number
    v_block_rows: Number
    v_head_rows: Number
    v_head_columns: Number
    out_stride_token: Number
    out_stride_head: Number
    lse_stride_head: Number
    lse_stride_token: Number
    block_table_stride: Number


class FoldArguments(NamedTuple):
    """The arguments of `fold_kernel`, in their order: those of `invariant_kernel` of their names.

    Args:
        num_programs: programs of `invariant_kernel`.
    """

    out: Pointer
    lse: Pointer
    states: Pointer
    query_start_loc: Pointer
    sinks: Option
    scale_log2: Option
    num_reqs: Number
    num_tokens: Number
    num_heads: Number
    num_splits: Number
    num_programs: Number
    out_stride_token: Number
    out_stride_head: Number
    lse_stride_head: Number
    lse_stride_token: Number


@gluon.jit
def compute_requests(args, config: gl.constexpr):
    """Compute the attention of all requests, and clear the rows of no request.

    Args:
        args: `InvariantArguments`.
        config: `Sm90Config`.
    """
    batch = BatchArgs(
        block_table=args.block_table,
        block_table_stride=args.block_table_stride,
        query_start_loc=args.query_start_loc,
        kv_lens=args.kv_lens,
        num_reqs=args.num_reqs,
        # a work item is of one KV head and split
        num_heads=args.num_heads // args.group_size * args.num_splits,
        group_size=1,
        max_decode_rows=0,
        num_splits=args.num_splits,
    )
    q = TmaTensor(args.q_desc, 0, 0, 0)
    k, v = locate_kv(args)
    score = ScoreArgs(args.scale_log2, args.sinks)
    shared = allocate(k.desc, v.desc, config)
    run_roles(
        consume_splits, args, score, produce_q_and_k,
        (shared, Loads(batch, q, k, args.group_size), args.work_counter, locate_split, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip


invariant_kernel = make_kernel("invariant_kernel", compute_requests, InvariantArguments)


@gluon.jit
def fold_splits(args, config: gl.constexpr):
    """Fold the states of shared splits, from the last to the first, and store the results.

    Grid: groups of ROWS rows.

    Args:
        args: `FoldArguments`.
        config: `Sm90Config`.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    KEPT: gl.constexpr = config.CONSUMERS * WARPGROUP_M * HEAD_DIM
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, OF_ROWS)  # [ROWS]
    token = row // args.num_heads
    head = row % args.num_heads
    is_row = token < count_live_tokens(args)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT)
    m_i = gl.full([ROWS], -float("inf"), gl.float32, OF_ROWS)
    l_i = gl.full([ROWS], 0.0, gl.float32, OF_ROWS)
    scale = softmax_scale(args.scale_log2, config)
    for i in range(args.num_splits):
        accs, maxima, sums = locate_states(
            args,
            args.num_splits - 1 - i,
            token,
            head,
            args.num_programs * KEPT,
            LAYOUT,
            config,
        )
        split_acc = gl.load(accs, mask=gl.expand_dims(is_row, 1), other=0.0)
        split_m = gl.load(maxima, mask=is_row, other=-float("inf"))
        split_l = gl.load(sums, mask=is_row, other=0.0)
        acc, m_i, l_i = fold(acc, m_i, l_i, split_acc, split_m, split_l, scale)
    sink = None
    if args.sinks is not None:
        sink = gl.load(args.sinks + head, mask=is_row, other=0.0)
    result, row_lse = normalize_state(acc, m_i, l_i, scale, sink)
    store_rows(args, result, token, head, is_row, config)
    store_lse(args, row_lse, token, head, is_row)


fold_kernel = make_kernel("fold_kernel", fold_splits, FoldArguments)
