"""Gluon kernel for Hopper: a producer warp loads tiles to a ring of buffers, consumers add them."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# triton 3.8 renamed it
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def produce(source, buffers, full, empty, num_tiles, STAGES: gl.constexpr):
    for tile in range(num_tiles):
        stage = tile % STAGES
        # the first tiles find empty buffers, as if a phase before had ended
        mbarrier.wait(empty.index(stage), (tile // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), source.block_type.nbytes)
        row = tile * source.block_type.shape[0]
        async_load(source, [row, 0], full.index(stage), buffers.index(stage))


@gluon.jit
def consume(target, buffers, full, empty, num_tiles, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = buffers.shape[1]
    COLUMNS: gl.constexpr = buffers.shape[2]
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for tile in range(num_tiles):
        stage = tile % STAGES
        mbarrier.wait(full.index(stage), tile // STAGES & 1)
        total += buffers.index(stage).load(layout)  # [ROWS, COLUMNS]
        mbarrier.arrive(empty.index(stage), count=1)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    gl.store(target + row[:, None] * COLUMNS + column[None, :], total)


@gluon.jit
def ring_kernel(source, target, num_tiles, STAGES: gl.constexpr):
    box: gl.constexpr = source.block_type.shape
    shape: gl.constexpr = [STAGES, box[0], box[1]]
    buffers = gl.allocate_shared_memory(source.dtype, shape, source.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (consume, (target, buffers, full, empty, num_tiles, STAGES)),
            (produce, (source, buffers, full, empty, num_tiles, STAGES)),
        ],
        [1],
        [24],
    )


def launches():
    """Yield the launch, and compare its result."""
    source = torch.randint(-9, 9, (7 * 16, 32)).float()
    target = torch.empty(16, 32)
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    tiles = TensorDescriptor.from_tensor(source, [16, 32], layout)
    yield ring_kernel, (1,), (tiles, target, 7, 3)
    assert torch.equal(target, source.view(7, 16, 32).sum(0)), (
        "target: expected the sum"
    )
