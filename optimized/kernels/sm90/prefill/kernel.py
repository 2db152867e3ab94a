"""Entry of the Hopper prefill kernel: a persistent, warp-specialized kernel, one program per SM.

The warps have the roles of `common/roles.py`. Requests with few rows have no work items here if the
decode kernel computes them. Without a decode launch, all requests have work items, and producer
warp 1 also clears the output rows of no request (padding.py). No program waits for another, and the
result does not depend on which program computes a work item.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.load_kv import TmaTensor, locate_kv
from ..common.roles import Loads, produce_q_and_k, run_roles
from ..common.scheduler import BatchArgs, locate_work
from ..common.score import ScoreArgs
from ..common.storage import allocate
from .consumer import consume_prefills
from .padding import clear_and_produce_v


class PrefillArguments(NamedTuple):
    """The arguments of `prefill_kernel`, in their order.

    Args:
        q_desc, k_desc, v_desc, out_desc: tensor maps; `TmaTensor` has their block and head steps.
        out: [tokens, heads, HEAD_SIZE], in the dtype of the queries or float32.
        lse: [heads, tokens], or None.
        block_table, query_start_loc, kv_lens, num_reqs, num_heads, group_size, max_decode_rows:
            `BatchArgs`.
        work_counter: [2] int32, 0 before and after the launch.
        sinks, k_scales, v_scales, key_factors, scale_log2: `ScoreArgs`. The factors of a request
            begin where its row of the block table says, counted in keys.
        cleared_tokens: tokens of the output. Rows of those that belong to no request are cleared.
            If 0, another launch clears them.
    """

    q_desc: TensorMap
    k_desc: TensorMap
    v_desc: TensorMap
    out_desc: TensorMap
    out: Pointer
    lse: Pointer
    block_table: Pointer
    query_start_loc: Pointer
    kv_lens: Pointer
    work_counter: Pointer
    sinks: Option
    k_scales: Option
    v_scales: Option
    key_factors: Option
    scale_log2: Option
    num_reqs: Number
    num_heads: Number
    group_size: Number
    max_decode_rows: Number
    q_head_rows: Number
    q_head_columns: Number
    k_block_rows: Number
    k_head_rows: Number
    k_head_columns: Number
    v_block_rows: Number
    v_head_rows: Number
    v_head_columns: Number
    out_head_rows: Number
    out_head_columns: Number
    out_stride_token: Number
    out_stride_head: Number
    lse_stride_head: Number
    lse_stride_token: Number
    block_table_stride: Number
    factor_stride_head: Number
    cleared_tokens: Number


@gluon.jit
def compute_prefills(args, config: gl.constexpr):
    """Compute the attention of all prefill requests of a batch.

    Args:
        args: `PrefillArguments`.
        config: `Sm90Config`.
    """
    batch = BatchArgs(
        block_table=args.block_table,
        block_table_stride=args.block_table_stride,
        query_start_loc=args.query_start_loc,
        kv_lens=args.kv_lens,
        num_reqs=args.num_reqs,
        num_heads=args.num_heads,
        group_size=args.group_size,
        max_decode_rows=args.max_decode_rows,
    )
    q = TmaTensor(args.q_desc, 0, args.q_head_rows, args.q_head_columns)
    k, v = locate_kv(args)
    score = ScoreArgs(
        args.scale_log2, args.sinks, args.k_scales, args.v_scales, args.key_factors
    )
    shared = allocate(k.desc, v.desc, config)
    run_roles(
        consume_prefills, args, score, produce_q_and_k,
        (shared, Loads(batch, q, k, config.GROUP), args.work_counter, locate_work, config),
        clear_and_produce_v, (shared, batch, v, args, config),
        shared, config,
    )  # fmt: skip


prefill_kernel = make_kernel("prefill_kernel", compute_prefills, PrefillArguments)
