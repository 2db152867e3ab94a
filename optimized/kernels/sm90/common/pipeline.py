"""Synchronization of the Hopper prefill kernel: mbarrier pipelines and the ping-pong order.

A pipeline is a ring of shared-memory stages. Its producer acquires an empty stage and fills it;
its consumers wait until the stage is full, read it and release it. Names follow CUTLASS.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .config import SWIZZLED_3D, box_rows, uses_ping_pong, warp_layout
from .gluon_names import aggregate, reinterpret


@aggregate
class PipelineState:
    """A position in a ring of stages, held by one producer or consumer.

    One count gives the stage and its phase, so that a loop carries one register per ring.

    Args:
        count: stages that were passed since the kernel began.
        num_stages: stages of the ring.
    """

    count: gl.tensor
    num_stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, count, num_stages):
        self.count = count
        self.num_stages = gl.constexpr(num_stages)

    @gluon.jit
    def start(num_stages: gl.constexpr):
        """Return the position of the first stage."""
        return PipelineState(gl.to_tensor(0), num_stages)

    @gluon.jit
    def stage(self):
        """Return the index of the stage."""
        return self.count % self.num_stages

    @gluon.jit
    def phase(self):
        """Return the phase parity that the stage's full barrier completes in this round."""
        return (self.count // self.num_stages) & 1

    @gluon.jit
    def advance(self):
        """Return the next position."""
        return PipelineState(self.count + 1, self.num_stages)

    @gluon.jit
    def previous(self):
        """Return the position before this one."""
        return PipelineState(self.count - 1, self.num_stages)


@aggregate
class MbarrierRing:
    """The mbarriers of a pipeline, a ring of stages.

    Args:
        full: [num_stages, 1] completes a phase when the stage is filled.
        empty: [num_stages, 1] completes a phase when all consumers have released the stage.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, full, empty):
        self.full = full
        self.empty = empty

    @gluon.jit
    def init_stage(self, stage: gl.constexpr, num_releases: gl.constexpr):
        """Initialize a stage's barriers: one producer, and consumers that release it."""
        mbarrier.init(self.full.index(stage), count=1)
        mbarrier.init(self.empty.index(stage), count=num_releases)

    @gluon.jit
    def producer_acquire(self, state):
        """Wait until the stage is empty. The first round does not wait."""
        mbarrier.wait(self.empty.index(state.stage()), state.phase() ^ 1)

    @gluon.jit
    def full_barrier(self, state):
        """Return the barrier that TMA loads into the stage signal."""
        return self.full.index(state.stage())

    @gluon.jit
    def producer_commit(self, state):
        """Arrive at the full barrier of a stage that was filled by ordinary stores."""
        mbarrier.arrive(self.full.index(state.stage()), count=1)

    @gluon.jit
    def consumer_wait(self, state):
        """Wait until the stage is full."""
        mbarrier.wait(self.full.index(state.stage()), state.phase())

    @gluon.jit
    def consumer_release(self, state):
        """Let the producer fill the stage again."""
        mbarrier.arrive(self.empty.index(state.stage()), count=1)


@gluon.jit
def allocate_barriers(num_barriers: gl.constexpr):
    """Return shared memory of mbarriers.  # [num_barriers, 1]"""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    return gl.allocate_shared_memory(gl.int64, [num_barriers, 1], layout)


class SharedStorage(NamedTuple):
    """Shared memory that the warps of a program have in common.

    Args:
        q: [query stages * consumers, WARPGROUP_M, HEAD_DIM] query tiles. A finished output tile
            overwrites its query tile, and is stored from there.
        q_tail: [query stages * consumers, WARPGROUP_M, TAIL_DIM] the queries' columns after
            HEAD_DIM. Without TAIL_DIM it is `q`, and not used.
        k, v: [boxes, box rows, BOX_COLUMNS] the stages of the KV tiles, as TMA fills them.
        k_tail: the same of the keys' columns after HEAD_DIM. Without TAIL_DIM it is `k`.
        work: [WORK_STAGES, 32 * WORK_FIELDS] the published work items, one copy per lane.
        q_pipe: one stage per query tile of a warpgroup.
        k_pipe: one stage per K tile. Its empty barrier i covers K tile i and V tile i - 1, so
            that consumers arrive once per iteration.
        v_pipe: one stage per V tile, with the empty barriers of `k_pipe`. One full barrier more,
            the last, is for the loads of a tile whose last rows must be cleared.
        work_pipe: WORK_STAGES stages, one per work item.
        never: [1, 1] no warp arrives at this barrier.
    """

    q: Any
    q_tail: Any
    k: Any
    k_tail: Any
    v: Any
    work: Any
    q_pipe: Any
    k_pipe: Any
    v_pipe: Any
    work_pipe: Any
    never: Any


@gluon.jit
def packed_q(shared, config: gl.constexpr):
    """Return the query tiles in the shape of TMA boxes of tokens, query heads and columns.

    Returns:
        [query stages * consumers, tokens, GROUP, HEAD_DIM], the same memory as `shared.q`. If GROUP
        does not divide WARPGROUP_M, tokens and heads are those of `box_rows`.
    """
    TILES: gl.constexpr = shared.q.shape[0]
    ROWS: gl.constexpr = box_rows(config)
    boxes: gl.constexpr = [TILES, ROWS[0], ROWS[1], config.HEAD_DIM]
    return reinterpret(shared.q, shared.q.dtype, boxes, SWIZZLED_3D)


# Named barriers of the ping-pong order, one per warpgroup: 128 threads wait at it and the 128
# threads of the warpgroup before arrive. Triton numbers its own from 0, so the last 3 of 16 are
# taken.
FIRST_NAMED_BARRIER = gl.constexpr(13)
WAIT_PTX = gl.constexpr("bar.sync $1, 256; mov.b32 $0, $1;")
ARRIVE_PTX = gl.constexpr("bar.arrive $1, 256; mov.b32 $0, $1;")


@gluon.jit
def ping_pong_wait(CONSUMER: gl.constexpr):
    """Wait until it is this warpgroup's turn at the tensor cores."""
    _named_barrier(WAIT_PTX, CONSUMER)


@gluon.jit
def ping_pong_arrive(CONSUMER: gl.constexpr):
    """Give the turn at the tensor cores to a warpgroup."""
    _named_barrier(ARRIVE_PTX, CONSUMER)


@gluon.jit
def start_ping_pong(config: gl.constexpr, CONSUMER: gl.constexpr):
    """Give the first turn at the tensor cores to the first warpgroup, if there are turns."""
    if uses_ping_pong(config) and CONSUMER == config.CONSUMERS - 1:
        ping_pong_arrive(0)


@gluon.jit
def end_ping_pong(config: gl.constexpr, CONSUMER: gl.constexpr):
    """Consume the last arrival, so that the named barrier ends as it began."""
    if uses_ping_pong(config) and CONSUMER == 0:
        ping_pong_wait(0)


@gluon.jit
def _named_barrier(PTX: gl.constexpr, CONSUMER: gl.constexpr):
    # one element per thread, so each thread executes the instruction once
    layout: gl.constexpr = warp_layout(gl.num_warps())
    barrier: gl.constexpr = FIRST_NAMED_BARRIER + CONSUMER
    gl.inline_asm_elementwise(
        PTX,
        "=r,r",
        [gl.full([32 * gl.num_warps()], barrier, gl.int32, layout)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
