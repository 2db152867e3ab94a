"""Entry of the Hopper kernel over a shared prefix, with the roles of the prefill kernel.

The queries of all requests are the rows of one sequence without a causal mask. A work item is a
query tile of one KV head and one split of the prefix. All work items take about the same time, so
program i computes items i, i + programs, i + 2 * programs, and so on, without a counter.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import warp_layout
from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.score import ScoreArgs
from ..prefill.kernel import allocate, run_roles
from ..prefill.producer import TmaTensor, produce_v
from ..prefill.scheduler import BatchArgs
from .consumer import PrefixOutput, consume_prefix
from .producer import produce_q_and_k
from .scheduler import PrefixRows

LAUNCH_PTX = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, $1;")


class PrefixArguments(NamedTuple):
    """The arguments of `cascade_prefix_sm90_kernel`, in their order.

    Args:
        q_desc, k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        prefix_out, prefix_lse: `PrefixOutput`.
        block_table: [max_blocks] row 0 of the block table.
        scale_log2: `ScoreArgs`.
        num_tokens, prefix_len, split_len, num_heads: `PrefixRows`.
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
def launch_dependents():
    """Let a dependent launch begin on the SMs that this launch leaves."""
    layout: gl.constexpr = warp_layout(gl.num_warps())
    gl.inline_asm_elementwise(
        LAUNCH_PTX,
        "=r,r",
        [gl.full([32 * gl.num_warps()], 0, gl.int32, layout)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


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
    prefix = PrefixRows(
        num_tokens=args.num_tokens,
        prefix_len=args.prefix_len,
        split_len=args.split_len,
        num_heads=args.num_heads,
    )
    q = TmaTensor(args.q_desc, 0, args.q_head_rows, args.q_head_columns)
    k = TmaTensor(args.k_desc, args.k_block_rows, args.k_head_rows, args.k_head_columns)
    v = TmaTensor(args.v_desc, args.v_block_rows, args.v_head_rows, args.v_head_columns)
    output = PrefixOutput(
        out=args.prefix_out,
        lse=args.prefix_lse,
        num_tokens=args.num_tokens,
        num_heads=args.num_heads * config.GROUP,
    )
    score = ScoreArgs(args.scale_log2, None)
    shared = allocate(
        k.desc.dtype, k.desc.block_type.shape[0], v.desc.block_type.shape[0], config
    )
    run_roles(
        consume_prefix, output, score, produce_q_and_k,
        (shared, batch, prefix, q, k, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip


cascade_prefix_sm90_kernel = make_kernel(
    "cascade_prefix_sm90_kernel", compute_prefix, PrefixArguments
)
