"""Entry of the Hopper append kernel: attention of few query tokens over long sequences.

A query tile has all query heads of a KV head, and its keys may be divided among several programs.
Grid: (KV heads, segments). The KV heads of a segment run at the same time, because their keys are
stored in the same cache blocks.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.load_kv import TmaTensor, locate_kv
from ..common.roles import Loads, produce_v, run_roles
from ..common.scheduler import BatchArgs
from ..common.score import ScoreArgs
from ..common.storage import allocate
from ..common.traits import count_tokens
from .consumer import consume_segment
from .segments import find_segment, produce_segment


class AppendArguments(NamedTuple):
    """The arguments of `append_kernel`, in their order.

    Args:
        q_desc: tensor map of the queries, with boxes of tokens, heads and columns.
        k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        out: [tokens, heads, HEAD_SIZE], in the dtype of the queries or float32.
        lse: [heads, tokens], or None.
        partials: [segments, 2, KV heads, partial_rows, HEAD_DIM] normalized rows of a segment: of
            the query tile that began in an earlier segment, and of the one that begins here. After
            them [segments, 2, KV heads, partial_rows] log-sum-exps in base 2.
        semaphores: [segments, KV heads, consumers] int32 arrivals of a warpgroup's partial results
            of the query tile that begins in a segment; 0 before and after the launch.
        partial_rows: rows of a query tile, at most, for which there is memory.
        num_tokens: tokens with those of no request.
        group_size: query heads per KV head.
        block_table, query_start_loc, kv_lens, num_reqs: `BatchArgs`.
        sinks, scale_log2: `ScoreArgs`.
    """

    q_desc: TensorMap
    k_desc: TensorMap
    v_desc: TensorMap
    out: Pointer
    lse: Pointer
    partials: Pointer
    semaphores: Pointer
    block_table: Pointer
    query_start_loc: Pointer
    kv_lens: Pointer
    sinks: Option
    scale_log2: Option
    num_reqs: Number
    num_tokens: Number
    partial_rows: Number
    group_size: Number
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


@gluon.jit
def compute_appends(args, config: gl.constexpr):
    """Compute the attention of all requests, and clear the rows of no request.

    Args:
        args: `AppendArguments`.
        config: `Sm90Config`.
    """
    batch = BatchArgs(
        block_table=args.block_table,
        block_table_stride=args.block_table_stride,
        query_start_loc=args.query_start_loc,
        kv_lens=args.kv_lens,
        num_reqs=args.num_reqs,
        num_heads=gl.num_programs(0),
        group_size=1,
        max_decode_rows=0,
    )
    q = TmaTensor(args.q_desc, 0, 0, 0)
    k, v = locate_kv(args)
    score = ScoreArgs(args.scale_log2, args.sinks)
    segment = find_segment(
        batch,
        gl.program_id(1),
        gl.num_programs(1),
        config,
        config.CONSUMERS * count_tokens(config),
    )
    shared = allocate(k.desc, v.desc, config)
    run_roles(
        consume_segment, args, score, produce_segment,
        (shared, Loads(batch, q, k, args.group_size), segment, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip


append_kernel = make_kernel("append_kernel", compute_appends, AppendArguments)
