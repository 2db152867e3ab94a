"""Entry of the Hopper prefill kernel: a persistent, warp-specialized kernel, one program per SM.

| warps | role | file |
|---|---|---|
| 2 or 3 x 4 | consumer warpgroups: WARPGROUP_M query rows each, wgmma and softmax | consumer.py |
| 1 | producer: takes work items from an atomic counter, loads Q and K by TMA | producer.py |
| 1 | producer: loads V by TMA, clears the rows past a sequence's end | producer.py |

Requests with few rows have no work items here if the decode kernel computes them. Without a decode
launch, all requests have work items, and producer warp 1 also clears the output rows of no request
(padding.py). No program waits for another, and the result does not depend on which program computes
a work item.
Source: FlashAttention-3 (Shah et al. 2024) for the roles and the overlap of softmax with products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from ..common.config import (
    BOX_COLUMNS,
    LINEAR,
    MAX_CONSUMERS,
    PRODUCER_REGISTERS,
    SWIZZLED,
    WARP_SIZE,
    WARPGROUP_M,
    WORK_STAGES,
    consumer_registers,
    count_q_stages,
)
from ..common.gluon_names import warp_specialize
from ..common.pipeline import Pipeline, SharedStorage, allocate_barriers
from ..common.score import ScoreArgs
from ..common.work_item import WORK_FIELDS
from .consumer import consume
from .epilogue import OutputArgs
from .padding import clear_and_produce_v
from .producer import TmaTensor, produce_q_and_k
from .scheduler import BatchArgs

# numbers that change from call to call, and must not make a specialization each
NUMBERS = [
    "num_reqs",
    "num_heads",
    "group_size",
    "max_decode_rows",
    "q_head_rows",
    "q_head_columns",
    "k_block_rows",
    "k_head_rows",
    "k_head_columns",
    "v_block_rows",
    "v_head_rows",
    "v_head_columns",
    "out_head_rows",
    "out_head_columns",
    "out_stride_token",
    "out_stride_head",
    "lse_stride_head",
    "lse_stride_token",
    "block_table_stride",
    "cleared_tokens",
]
POINTERS = [
    "out",
    "lse",
    "block_table",
    "query_start_loc",
    "kv_lens",
    "work_counter",
    "sinks",
    "k_scales",
    "v_scales",
]


@gluon.jit
def allocate(
    dtype: gl.constexpr,
    k_box_rows: gl.constexpr,
    v_box_rows: gl.constexpr,
    config: gl.constexpr,
):
    """Return the `SharedStorage` of a program, with its barriers initialized."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    Q_STAGES: gl.constexpr = count_q_stages(config)
    COLUMN_BOXES: gl.constexpr = HEAD_DIM // BOX_COLUMNS
    K_BOXES: gl.constexpr = STAGES * (BLOCK_N // k_box_rows) * COLUMN_BOXES
    V_BOXES: gl.constexpr = STAGES * (BLOCK_N // v_box_rows) * COLUMN_BOXES
    q = gl.allocate_shared_memory(
        dtype, [Q_STAGES * config.CONSUMERS, WARPGROUP_M, HEAD_DIM], SWIZZLED
    )
    k = gl.allocate_shared_memory(dtype, [K_BOXES, k_box_rows, BOX_COLUMNS], SWIZZLED)
    v = gl.allocate_shared_memory(dtype, [V_BOXES, v_box_rows, BOX_COLUMNS], SWIZZLED)
    # not None without TAIL_DIM: triton 3.6 does not return a tuple with None
    q_tail = q
    k_tail = k
    if config.TAIL_DIM > 0:
        # one box per row of boxes
        gl.static_assert(config.TAIL_DIM == BOX_COLUMNS)
        q_tail = gl.allocate_shared_memory(
            dtype, [Q_STAGES * config.CONSUMERS, WARPGROUP_M, BOX_COLUMNS], SWIZZLED
        )
        k_tail = gl.allocate_shared_memory(
            dtype, [K_BOXES // COLUMN_BOXES, k_box_rows, BOX_COLUMNS], SWIZZLED
        )
    work = gl.allocate_shared_memory(
        gl.int32, [WORK_STAGES, WARP_SIZE * WORK_FIELDS], LINEAR
    )
    q_pipe = Pipeline(allocate_barriers(Q_STAGES), allocate_barriers(Q_STAGES))
    k_pipe = Pipeline(allocate_barriers(STAGES), allocate_barriers(STAGES))
    v_pipe = Pipeline(allocate_barriers(STAGES + 1), k_pipe.empty)
    work_pipe = Pipeline(allocate_barriers(WORK_STAGES), allocate_barriers(WORK_STAGES))
    never = allocate_barriers(1)
    # Full and empty barriers alternate, and the two rings share a loop, because triton 3.6
    # synchronizes the CTA between two writes to one array.
    gl.static_assert(Q_STAGES <= WORK_STAGES)
    for i in gl.static_range(WORK_STAGES):
        if i < Q_STAGES:
            q_pipe.init_stage(i, config.CONSUMERS)
        # read by the consumers and by the warp that loads V
        work_pipe.init_stage(i, config.CONSUMERS + 1)
    for i in gl.static_range(STAGES):
        k_pipe.init_stage(i, config.CONSUMERS)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(v_pipe.full.index(i), count=1)
    mbarrier.init(never.index(0), count=1)
    fence_async_shared()
    return SharedStorage(
        q, q_tail, k, k_tail, v, work, q_pipe, k_pipe, v_pipe, work_pipe, never
    )


@gluon.jit
def run_roles(
    consume: gl.constexpr,
    output,
    score,
    produce_q_and_k: gl.constexpr,
    producer_args,
    produce_v: gl.constexpr,
    v_args,
    shared,
    config: gl.constexpr,
):
    """Run the consumer warpgroups and the two producer warps of a program.

    Args:
        consume: role of a consumer warpgroup.
        output, score: what it stores to, and its `ScoreArgs`.
        produce_q_and_k: role of producer warp 0.
        producer_args: its arguments.
        produce_v: role of producer warp 1, which loads V.
        v_args: its arguments.
        shared: `SharedStorage`.
    """
    N: gl.constexpr = config.CONSUMERS
    REGISTERS: gl.constexpr = consumer_registers(config)
    # three consumers at most: the first entries of the lists are left out if there are two
    UNUSED: gl.constexpr = MAX_CONSUMERS - N
    warp_specialize(
        [
            # the first role runs in the 4 warps of the launch, the others in additional warps
            (consume, (shared, output, score, config, N - 3)),
            (consume, (shared, output, score, config, N - 2)),
            (consume, (shared, output, score, config, N - 1)),
            (produce_q_and_k, producer_args),
            (produce_v, v_args),
        ][UNUSED:],
        [4, 4, 1, 1][UNUSED:],
        [REGISTERS, REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS][UNUSED:],
    )


# The arguments are flat, and grouped in the body, for two reasons: triton 3.6 and 3.7 specialize
# the numbers in a tuple even if `do_not_specialize` names it, and the launcher fills them in order.
@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    lse,
    block_table,
    query_start_loc,
    kv_lens,
    work_counter,
    sinks,
    k_scales,
    v_scales,
    scale_log2,
    num_reqs,
    num_heads,
    group_size,
    max_decode_rows,
    q_head_rows,
    q_head_columns,
    k_block_rows,
    k_head_rows,
    k_head_columns,
    v_block_rows,
    v_head_rows,
    v_head_columns,
    out_head_rows,
    out_head_columns,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    block_table_stride,
    cleared_tokens,
    config: gl.constexpr,
):
    """Compute the attention of all prefill requests of a batch.

    Args:
        q_desc, k_desc, v_desc, out_desc: tensor maps; `TmaTensor` has their block and head steps.
        out, lse: `OutputArgs`.
        block_table, query_start_loc, kv_lens: `BatchArgs`.
        work_counter: [2] int32, 0 before and after the launch.
        sinks, k_scales, v_scales, scale_log2: `ScoreArgs`.
        cleared_tokens: tokens of the output. Rows of those that belong to no request are cleared.
            If 0, another launch clears them.
        config: `Config`.
    """
    batch = BatchArgs(
        block_table,
        block_table_stride,
        query_start_loc,
        kv_lens,
        num_reqs,
        num_heads,
        group_size,
        max_decode_rows,
    )
    q = TmaTensor(q_desc, 0, q_head_rows, q_head_columns)
    k = TmaTensor(k_desc, k_block_rows, k_head_rows, k_head_columns)
    v = TmaTensor(v_desc, v_block_rows, v_head_rows, v_head_columns)
    output = OutputArgs(
        TmaTensor(out_desc, 0, out_head_rows, out_head_columns),
        out,
        lse,
        out_stride_token,
        out_stride_head,
        lse_stride_token,
        lse_stride_head,
    )
    score = ScoreArgs(scale_log2, sinks, k_scales, v_scales)
    shared = allocate(
        k_desc.dtype,
        k_desc.block_type.shape[0],
        v_desc.block_type.shape[0],
        config,
    )
    run_roles(
        consume, output, score, produce_q_and_k,
        (shared, batch, q, k, work_counter, config),
        clear_and_produce_v, (shared, batch, v, output, cleared_tokens, config),
        shared, config,
    )  # fmt: skip
