"""Entry of the Hopper append kernel: attention of few query tokens over long sequences.

The roles are those of the prefill kernel (`..kernel`). A query tile has all query heads of a KV
head, and its keys may be divided among several programs. Grid: (KV heads, segments). The KV heads
of a segment run at the same time, because their keys are stored in the same cache blocks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import count_tokens
from ..common.score import ScoreArgs
from ..prefill.kernel import allocate, run_roles
from ..prefill.producer import TmaTensor, produce_v
from ..prefill.scheduler import BatchArgs
from .consumer import consume_segment
from .producer import produce_q_and_k
from .rows import OutputArgs
from .segments import SPANS, find_segment

# numbers that change from call to call, and must not make a specialization each
NUMBERS = [
    "num_reqs",
    "num_tokens",
    "min_tiles",
    "partial_rows",
    "group_size",
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
]
POINTERS = [
    "out",
    "lse",
    "partials",
    "semaphores",
    "block_table",
    "query_start_loc",
    "kv_lens",
    "sinks",
]


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def append_kernel(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    partials,
    semaphores,
    block_table,
    query_start_loc,
    kv_lens,
    sinks,
    scale_log2,
    num_reqs,
    num_tokens,
    min_tiles,
    partial_rows,
    group_size,
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
        q_desc: tensor map of the queries, with boxes of tokens, heads and columns.
        k_desc, v_desc: tensor maps; `TmaTensor` has their block and head steps.
        out, lse, partials, semaphores, partial_rows, num_tokens, group_size: `OutputArgs`.
        block_table, query_start_loc, kv_lens, num_reqs: `BatchArgs`.
        sinks, scale_log2: `ScoreArgs`.
        min_tiles: KV tiles of a segment, at least.
        config: `Config`.
    """
    batch = BatchArgs(
        block_table,
        block_table_stride,
        query_start_loc,
        kv_lens,
        num_reqs,
        gl.num_programs(0),
        SPANS,
        0,
    )
    k = TmaTensor(k_desc, k_block_rows, k_head_rows, k_head_columns)
    v = TmaTensor(v_desc, v_block_rows, v_head_rows, v_head_columns)
    output = OutputArgs(
        out,
        lse,
        partials,
        semaphores,
        partial_rows,
        query_start_loc,
        num_reqs,
        num_tokens,
        group_size,
        out_stride_token,
        out_stride_head,
        lse_stride_token,
        lse_stride_head,
    )
    score = ScoreArgs(scale_log2, sinks)
    segment = find_segment(
        batch,
        gl.program_id(1),
        gl.num_programs(1),
        min_tiles,
        config,
        config.CONSUMERS * count_tokens(config),
    )
    shared = allocate(
        k_desc.dtype,
        k_desc.block_type.shape[0],
        v_desc.block_type.shape[0],
        config,
    )
    run_roles(
        consume_segment, output, score, produce_q_and_k,
        (shared, batch, q_desc, k, output, segment, config),
        produce_v, (shared, batch, v, config), shared, config,
    )  # fmt: skip
