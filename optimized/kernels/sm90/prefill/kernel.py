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

from typing import NamedTuple

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
from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.gluon_names import warp_specialize
from ..common.pipeline import MbarrierRing, SharedStorage, allocate_barriers
from ..common.score import ScoreArgs
from ..common.work_item import WORK_FIELDS
from .consumer import consume
from .epilogue import PrefillOutput
from .padding import clear_and_produce_v
from .producer import TmaTensor, produce_q_and_k
from .scheduler import BatchArgs


class PrefillArguments(NamedTuple):
    """The arguments of `prefill_kernel`, in their order.

    Args:
        q_desc, k_desc, v_desc, out_desc: tensor maps; `TmaTensor` has their block and head steps.
        out, lse: `PrefillOutput`.
        block_table, query_start_loc, kv_lens, num_reqs, num_heads, group_size, max_decode_rows:
            `BatchArgs`.
        work_counter: [2] int32, 0 before and after the launch.
        sinks, k_scales, v_scales, scale_log2: `ScoreArgs`.
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
    cleared_tokens: Number


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
    q_pipe = MbarrierRing(allocate_barriers(Q_STAGES), allocate_barriers(Q_STAGES))
    k_pipe = MbarrierRing(allocate_barriers(STAGES), allocate_barriers(STAGES))
    v_pipe = MbarrierRing(allocate_barriers(STAGES + 1), k_pipe.empty)
    work_pipe = MbarrierRing(
        allocate_barriers(WORK_STAGES), allocate_barriers(WORK_STAGES)
    )
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
    k = TmaTensor(args.k_desc, args.k_block_rows, args.k_head_rows, args.k_head_columns)
    v = TmaTensor(args.v_desc, args.v_block_rows, args.v_head_rows, args.v_head_columns)
    output = PrefillOutput(
        plane=TmaTensor(args.out_desc, 0, args.out_head_rows, args.out_head_columns),
        out=args.out,
        lse=args.lse,
        out_stride_token=args.out_stride_token,
        out_stride_head=args.out_stride_head,
        lse_stride_token=args.lse_stride_token,
        lse_stride_head=args.lse_stride_head,
    )
    score = ScoreArgs(args.scale_log2, args.sinks, args.k_scales, args.v_scales)
    shared = allocate(
        k.desc.dtype, k.desc.block_type.shape[0], v.desc.block_type.shape[0], config
    )
    run_roles(
        consume, output, score, produce_q_and_k,
        (shared, batch, q, k, args.work_counter, config),
        clear_and_produce_v, (shared, batch, v, output, args.cleared_tokens, config),
        shared, config,
    )  # fmt: skip


prefill_kernel = make_kernel("prefill_kernel", compute_prefills, PrefillArguments)
