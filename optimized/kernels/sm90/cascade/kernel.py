"""Entry of the Hopper kernel over a shared prefix, with the roles of the prefill kernel.

The queries of all requests are the rows of one sequence without a causal mask. A work item is a
query tile of one KV head and one split of the prefix. All work items take about the same time, so
program i computes items i, i + programs, i + 2 * programs, and so on, without a counter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import warp_layout
from ..common.score import ScoreArgs
from ..prefill.kernel import allocate, run_roles
from ..prefill.producer import TmaTensor, produce_v
from ..prefill.scheduler import BatchArgs
from .consumer import PartialArgs, consume_prefix
from .producer import produce_q_and_k
from .scheduler import PrefixArgs

LAUNCH_PTX = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, $1;")

# numbers that change from call to call, and must not make a specialization each
NUMBERS = [
    "num_tokens",
    "prefix_len",
    "split_len",
    "num_heads",
    "group_size",
    "q_head_rows",
    "q_head_columns",
    "k_block_rows",
    "k_head_rows",
    "k_head_columns",
    "v_block_rows",
    "v_head_rows",
    "v_head_columns",
]
POINTERS = ["prefix_out", "prefix_lse", "block_table"]


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


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def cascade_prefix_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    prefix_out,
    prefix_lse,
    block_table,
    scale_log2,
    num_tokens,
    prefix_len,
    split_len,
    num_heads,
    group_size,
    q_head_rows,
    q_head_columns,
    k_block_rows,
    k_head_rows,
    k_head_columns,
    v_block_rows,
    v_head_rows,
    v_head_columns,
    config: gl.constexpr,
):
    """Attend to the prefix with all tokens, and store a partial result per row and split.

    Rows of tokens that belong to no request are computed too, and are not used.

    Args:
        q_desc, k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        prefix_out, prefix_lse: `PartialArgs`.
        block_table: [max_blocks] row 0 of the block table.
        scale_log2: `ScoreArgs`.
        num_tokens, prefix_len, split_len, num_heads: `PrefixArgs`.
        group_size: heads that have work items per KV head.
        config: `Config`, not causal.
    """
    launch_dependents()
    # a split is a request whose row of the block table begins within row 0
    batch = BatchArgs(
        block_table,
        split_len // config.BLOCK_SIZE,
        block_table,
        block_table,
        1,
        num_heads,
        group_size,
        0,
    )
    prefix = PrefixArgs(num_tokens, prefix_len, split_len, num_heads)
    q = TmaTensor(q_desc, 0, q_head_rows, q_head_columns)
    k = TmaTensor(k_desc, k_block_rows, k_head_rows, k_head_columns)
    v = TmaTensor(v_desc, v_block_rows, v_head_rows, v_head_columns)
    output = PartialArgs(prefix_out, prefix_lse, num_tokens, num_heads * config.GROUP)
    score = ScoreArgs(scale_log2, None)
    shared = allocate(
        k_desc.dtype,
        k_desc.block_type.shape[0],
        v_desc.block_type.shape[0],
        config,
    )
    run_roles(
        consume_prefix, output, score, produce_q_and_k,
        (shared, batch, prefix, q, k, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip
