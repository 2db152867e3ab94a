"""Entry of the Hopper append kernel: attention of few query tokens over long sequences.

The roles are those of the prefill kernel (`..kernel`). A query tile has all query heads of a KV
head, and its keys may be divided among several programs. Grid: (KV heads, segments). The KV heads
of a segment run at the same time, because their keys are stored in the same cache blocks.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import count_tokens
from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.score import ScoreArgs
from ..prefill.kernel import allocate, run_roles
from ..prefill.producer import TmaTensor, produce_v
from ..prefill.scheduler import BatchArgs
from .consumer import consume_segment
from .producer import produce_q_and_k
from .rows import AppendOutput
from .segments import find_segment


class AppendArguments(NamedTuple):
    """The arguments of `append_kernel`, in their order.

    Args:
        q_desc: tensor map of the queries, with boxes of tokens, heads and columns.
        k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        out, lse, partials, semaphores, partial_rows, num_tokens, group_size: `AppendOutput`.
        block_table, query_start_loc, kv_lens, num_reqs: `BatchArgs`.
        sinks, scale_log2: `ScoreArgs`.
        min_tiles: KV tiles of a segment, at least.
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
    min_tiles: Number
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
    k = TmaTensor(args.k_desc, args.k_block_rows, args.k_head_rows, args.k_head_columns)
    v = TmaTensor(args.v_desc, args.v_block_rows, args.v_head_rows, args.v_head_columns)
    output = AppendOutput(
        out=args.out,
        lse=args.lse,
        partials=args.partials,
        semaphores=args.semaphores,
        partial_rows=args.partial_rows,
        query_start_loc=args.query_start_loc,
        num_reqs=args.num_reqs,
        num_tokens=args.num_tokens,
        group_size=args.group_size,
        out_stride_token=args.out_stride_token,
        out_stride_head=args.out_stride_head,
        lse_stride_token=args.lse_stride_token,
        lse_stride_head=args.lse_stride_head,
    )
    score = ScoreArgs(args.scale_log2, args.sinks)
    segment = find_segment(
        batch,
        gl.program_id(1),
        gl.num_programs(1),
        args.min_tiles,
        config,
        config.CONSUMERS * count_tokens(config),
    )
    shared = allocate(
        k.desc.dtype, k.desc.block_type.shape[0], v.desc.block_type.shape[0], config
    )
    run_roles(
        consume_segment, output, score, produce_q_and_k,
        (shared, batch, args.q_desc, k, output, segment, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip


append_kernel = make_kernel("append_kernel", compute_appends, AppendArguments)
