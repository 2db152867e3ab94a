"""Entry of the Hopper latent decode kernel: split-KV attention to a cache of latent vectors.

| warps | role | file |
|---|---|---|
| 4 | consumer 0: Q @ K, softmax, P @ V of value columns 0 to 255 | consumer.py |
| 4 | consumer 1: P @ V of value columns 256 to 511 | consumer.py |
| 1 | producer: loads Q and the KV tiles by TMA | producer.py |
| or 4 | producer: loads Q by TMA, and copies the KV tiles row by row | gather.py |

A latent vector is loaded once and is key and value of all heads. Grid: one program per segment of
`schedule.py`. There are two kernels: boxes of TMA read cache blocks of a multiple of 16 tokens, and
copies read blocks of any size, such as the single slots of sparse attention.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from ..common.config import LINEAR, SWIZZLED
from ..common.dependents import launch_dependents, wait_for_launch_before
from ..common.entry import Number, Option, Pointer, TensorMap, make_kernel
from ..common.load_kv import TmaTensor
from ..common.pipeline import MbarrierRing, allocate_barriers
from ..common.scheduler import BatchArgs
from .config import (
    BLOCK_M,
    BLOCK_N,
    BOX_COLUMNS,
    CONSUMER_REGISTERS,
    COPY_WARPS,
    HALF_BOXES,
    PRODUCER_REGISTERS,
    STAGES,
)
from .consumer import consume_scores, consume_values
from .gather import CachedLatents, produce_copies
from .producer import produce
from .schedule import find_latent_segment
from .sync import LatentStorage


class LatentArguments(NamedTuple):
    """The arguments of `latent_decode_kernel`, in their order.

    Args:
        q_desc: tensor map of the queries as rows, [tokens * heads, RANK + ROPE_DIM].
        kv_desc: tensor map of the cache as rows.
        out: [tokens, heads, RANK].
        lse: [heads, tokens], or None.
        partial_out: [segments, 2, partial_rows, RANK] float32.
        partial_lse: [segments, 2, partial_rows] float32, in base 2.
        splits: [segments, 4] int32: the row tile that begins in a segment and ends in a later one.
            Its last segment, the batch's rows before it, its own rows, and nothing. The first is -1
            if there is none.
        partial_rows: rows of a row tile, at most.
        block_table, query_start_loc, seq_lens, num_reqs, num_heads: `BatchArgs`.
        scale_log2: the scale of the dot products times log2(e), positive.
        kv_block_rows: rows from cache block to cache block.
    """

    q_desc: TensorMap
    kv_desc: TensorMap
    out: Pointer
    lse: Pointer
    partial_out: Pointer
    partial_lse: Pointer
    splits: Pointer
    block_table: Pointer
    query_start_loc: Pointer
    seq_lens: Pointer
    scale_log2: Option
    num_reqs: Number
    num_heads: Number
    partial_rows: Number
    kv_block_rows: Number
    out_stride_token: Number
    out_stride_head: Number
    lse_stride_head: Number
    lse_stride_token: Number
    block_table_stride: Number


class CopiedLatentArguments(NamedTuple):
    """The arguments of `copied_latent_decode_kernel`, in their order.

    Args:
        cache: [num_blocks, block_size, 1, RANK + ROPE_DIM].
        kv_block_stride, kv_slot_stride: elements from cache block to cache block, and from slot to
            slot.
        q_desc, out, ...: as in `LatentArguments`.
    """

    q_desc: TensorMap
    cache: Pointer
    out: Pointer
    lse: Pointer
    partial_out: Pointer
    partial_lse: Pointer
    splits: Pointer
    block_table: Pointer
    query_start_loc: Pointer
    seq_lens: Pointer
    scale_log2: Option
    num_reqs: Number
    num_heads: Number
    partial_rows: Number
    kv_block_stride: Number
    kv_slot_stride: Number
    out_stride_token: Number
    out_stride_head: Number
    lse_stride_head: Number
    lse_stride_token: Number
    block_table_stride: Number


@gluon.jit
def _allocate(
    dtype: gl.constexpr,
    q_rows: gl.constexpr,
    box_rows: gl.constexpr,
    IS_COPIED: gl.constexpr,
):
    """Return the `LatentStorage` of a program, with its barriers initialized.

    Args:
        q_rows, box_rows: rows of a box of queries, and of the cache.
        IS_COPIED: whether all threads of the copying warps arrive at a full barrier.
    """
    ARRIVALS: gl.constexpr = 32 * COPY_WARPS if IS_COPIED else 1
    Q_BOXES: gl.constexpr = BLOCK_M // q_rows
    BOXES: gl.constexpr = STAGES * (BLOCK_N // box_rows)
    q_half: gl.constexpr = [Q_BOXES * HALF_BOXES, q_rows, BOX_COLUMNS]
    half: gl.constexpr = [BOXES * HALF_BOXES, box_rows, BOX_COLUMNS]
    q_0 = gl.allocate_shared_memory(dtype, q_half, SWIZZLED)
    q_1 = gl.allocate_shared_memory(dtype, q_half, SWIZZLED)
    q_rope = gl.allocate_shared_memory(dtype, [Q_BOXES, q_rows, BOX_COLUMNS], SWIZZLED)
    half_0 = gl.allocate_shared_memory(dtype, half, SWIZZLED)
    half_1 = gl.allocate_shared_memory(dtype, half, SWIZZLED)
    rope = gl.allocate_shared_memory(dtype, [BOXES, box_rows, BOX_COLUMNS], SWIZZLED)
    p = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], SWIZZLED)
    alpha = gl.allocate_shared_memory(gl.float32, [BLOCK_M], LINEAR)
    q_pipe = MbarrierRing(allocate_barriers(1), allocate_barriers(1))
    FULL: gl.constexpr = STAGES if IS_COPIED else STAGES + 1
    pipe_0 = MbarrierRing(allocate_barriers(FULL), allocate_barriers(STAGES))
    pipe_1 = MbarrierRing(allocate_barriers(FULL), allocate_barriers(STAGES))
    q_pipe.init_stage(0, 1)
    for i in gl.static_range(STAGES):
        pipe_0.init_stage(i, 1, ARRIVALS)
        # read by both consumers
        pipe_1.init_stage(i, 2, ARRIVALS)
    if not IS_COPIED:
        mbarrier.init(pipe_0.full.index(STAGES), count=1)
        mbarrier.init(pipe_1.full.index(STAGES), count=1)
    fence_async_shared()
    return LatentStorage(
        q_0, q_1, q_rope, half_0, half_1, rope, p, alpha, q_pipe, pipe_0, pipe_1
    )


@gluon.jit
def _describe_batch(args):
    """Return the `BatchArgs` of a kernel's arguments."""
    return BatchArgs(
        block_table=args.block_table,
        block_table_stride=args.block_table_stride,
        query_start_loc=args.query_start_loc,
        kv_lens=args.seq_lens,
        num_reqs=args.num_reqs,
        num_heads=args.num_heads,
        group_size=1,
        max_decode_rows=0,
    )


@gluon.jit
def compute_latent_decodes(args, BLOCK_SIZE: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute the attention of all requests of a batch to their latents.

    Args:
        args: `LatentArguments`.
        BLOCK_SIZE: tokens per cache block, a multiple of 16.
        CAUSAL: whether later keys are masked.
    """
    wait_for_launch_before()
    launch_dependents()
    batch = _describe_batch(args)
    kv = TmaTensor(args.kv_desc, args.kv_block_rows, 0, 0)
    segment = find_latent_segment(batch)
    shared = _allocate(
        kv.desc.dtype,
        args.q_desc.block_type.shape[0],
        kv.desc.block_type.shape[0],
        False,
    )
    gl.warp_specialize(
        [
            # the first role runs in the 4 warps of the launch, the others in additional warps
            (consume_scores, (shared, args, batch, segment, CAUSAL)),
            (consume_values, (shared, args, batch, segment)),
            (produce, (shared, batch, args.q_desc, kv, segment, BLOCK_SIZE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def compute_copied_latents(args, BLOCK_SIZE: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute the attention of all requests of a batch to latents in blocks of any size.

    Args:
        args: `CopiedLatentArguments`.
        BLOCK_SIZE: tokens per cache block.
        CAUSAL: whether later keys are masked.
    """
    wait_for_launch_before()
    launch_dependents()
    batch = _describe_batch(args)
    latents = CachedLatents(args.cache, args.kv_block_stride, args.kv_slot_stride)
    segment = find_latent_segment(batch)
    shared = _allocate(
        args.q_desc.dtype, args.q_desc.block_type.shape[0], BLOCK_N, True
    )
    gl.warp_specialize(
        [
            (consume_scores, (shared, args, batch, segment, CAUSAL)),
            (consume_values, (shared, args, batch, segment)),
            (
                produce_copies,
                (shared, batch, args.q_desc, latents, segment, BLOCK_SIZE),
            ),
        ],
        [4, COPY_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


latent_decode_kernel = make_kernel(
    "latent_decode_kernel", compute_latent_decodes, LatentArguments
)
copied_latent_decode_kernel = make_kernel(
    "copied_latent_decode_kernel", compute_copied_latents, CopiedLatentArguments
)
