"""Entry of the Hopper kernel over a shared prefix.

The queries of all requests are the rows of one sequence without a causal mask. A work item is a
query tile of one KV head and one split of the prefix. All work items take about the same time, so
program i computes items i, i + programs, i + 2 * programs, and so on, without a counter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.dependents import launch_dependents
from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.load_kv import TmaTensor, locate_kv
from ..common.roles import Loads, produce_v, run_roles
from ..common.scheduler import BatchArgs
from ..common.score import ScoreArgs
from ..common.storage import allocate
from .consumer import consume_prefix
from .scheduler import produce_prefix


class PrefixArguments(NamedTuple):
    """The arguments of `cascade_prefix_sm90_kernel`, in their order.

    Args:
        q_desc, k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        prefix_out: [splits, tokens, query heads, HEAD_SIZE] float32 normalized partial results. The
            second launch of a cascade merges them.
        prefix_lse: [splits, tokens, query heads] float32 log-sum-exp in base 2.
        block_table: [max_blocks] row 0 of the block table.
        scale_log2: `ScoreArgs`.
        num_tokens: tokens of all requests.
        prefix_len: keys of the prefix, at least 1.
        split_len: keys per split, a multiple of BLOCK_N and of the block size.
        num_heads: heads that have work items: query heads, or KV heads if a tile has the rows of
            all query heads that share one.
        group_size: heads that have work items per KV head.
    """

    q_desc: TensorMap
    k_desc: TensorMap
    v_desc: TensorMap
    prefix_out: Pointer
    prefix_lse: Pointer
    block_table: Pointer
    scale_log2: Option
    num_tokens: Number
    prefix_len: Number
    split_len: Number
    num_heads: Number
    group_size: Number
    q_head_rows: Number
    q_head_columns: Number
    k_block_rows: Number
    k_head_rows: Number
    k_head_columns: Number
    v_block_rows: Number
    v_head_rows: Number
    v_head_columns: Number


@gluon.jit
def compute_prefix(args, config: gl.constexpr):
    """Attend to the prefix with all tokens, and store a partial result per row and split.

    Rows of tokens that belong to no request are computed too, and are not used.

    Args:
        args: `PrefixArguments`.
        config: `Sm90Config`, not causal.
    """
    launch_dependents()
    batch = BatchArgs(
        block_table=args.block_table,
        # a split is a request whose row of the block table begins within row 0
        block_table_stride=args.split_len // config.BLOCK_SIZE,
        query_start_loc=args.block_table,
        kv_lens=args.block_table,
        num_reqs=1,
        num_heads=args.num_heads,
        group_size=args.group_size,
        max_decode_rows=0,
    )
    q = TmaTensor(args.q_desc, 0, args.q_head_rows, args.q_head_columns)
    k, v = locate_kv(args)
    score = ScoreArgs(args.scale_log2, None)
    shared = allocate(k.desc, v.desc, config)
    run_roles(
        consume_prefix, args, score, produce_prefix,
        (shared, Loads(batch, q, k, config.GROUP), args, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip


cascade_prefix_sm90_kernel = make_kernel(
    "cascade_prefix_sm90_kernel", compute_prefix, PrefixArguments
)
