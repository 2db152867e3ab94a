"""Synchronization of the Hopper kernels: mbarrier pipelines and the ping-pong order.

A pipeline is a ring of shared-memory stages. Its producer acquires an empty stage and fills it;
its consumers wait until the stage is full, read it and release it. Names follow CUTLASS.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .gluon_names import aggregate
from .traits import count_q_stages, uses_ping_pong, warp_layout


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
    def init_stage(
        self,
        stage: gl.constexpr,
        num_releases: gl.constexpr,
        num_arrivals: gl.constexpr = 1,
    ):
        """Initialize a stage's barriers: arrivals that fill it, and consumers that release it."""
        mbarrier.init(self.full.index(stage), count=num_arrivals)
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


@gluon.jit
def release_previous_q(shared, q_state, config: gl.constexpr):
    """Let the producer load queries where the previous work item's output was stored from."""
    if count_q_stages(config) > 1 and q_state.count > 0:
        tma.store_wait(0)
        shared.q_pipe.consumer_release(q_state.previous())


@gluon.jit
def release_stored_q(shared, q_state, work, config: gl.constexpr):
    """Let the producer load queries where a work item's output is stored from, if it has one tile.

    Args:
        q_state: state of the next work item's queries.
    """
    if count_q_stages(config) == 1 and work.num_kv_tiles > 0:
        tma.store_wait(0)
        shared.q_pipe.consumer_release(q_state.previous())


# Named barriers of the ping-pong order, one per warpgroup: 128 threads wait at it and the 128
# threads of the warpgroup before arrive. Triton numbers its own from 0, so the last 3 of 16 are
# taken.
FIRST_NAMED_BARRIER = gl.constexpr(13)
WAIT_PTX = gl.constexpr("bar.sync $1, 256; mov.b32 $0, $1;")
ARRIVE_PTX = gl.constexpr("bar.arrive $1, 256; mov.b32 $0, $1;")


@gluon.jit
def ping_pong_wait(CONSUMER: gl.constexpr):
    """Wait until it is this warpgroup's turn at the tensor cores."""
    named_barrier(WAIT_PTX, FIRST_NAMED_BARRIER + CONSUMER)


@gluon.jit
def ping_pong_arrive(CONSUMER: gl.constexpr):
    """Give the turn at the tensor cores to a warpgroup."""
    named_barrier(ARRIVE_PTX, FIRST_NAMED_BARRIER + CONSUMER)


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
def named_barrier(PTX: gl.constexpr, barrier: gl.constexpr):
    """Wait or arrive at a named barrier with all threads.

    Args:
        PTX: WAIT_PTX or ARRIVE_PTX.
        barrier: number of the barrier.
    """
    # one element per thread, so each thread executes the instruction once
    layout: gl.constexpr = warp_layout(gl.num_warps())
    gl.inline_asm_elementwise(
        PTX,
        "=r,r",
        [gl.full([32 * gl.num_warps()], barrier, gl.int32, layout)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
