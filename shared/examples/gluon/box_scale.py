"""Gluon kernel for Hopper: twice each element of a matrix, in boxes that TMA loads and stores."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# triton 3.8 renamed both
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def box_scale_kernel(source, target):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    box: gl.constexpr = source.block_type.shape
    tile = gl.allocate_shared_memory(source.dtype, box, source.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    row = gl.program_id(0) * box[0]
    mbarrier.expect(loaded, source.block_type.nbytes)
    async_load(source, [row, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    x = tile.load(layout)  # [*box]
    tile.store(x + x)
    fence_async_shared()
    async_store(target, [row, 0], tile)
    tma.store_wait(0)
    mbarrier.invalidate(loaded)


def launches():
    """Yield the launch, and compare its result."""
    source = torch.randn(96, 32)
    target = torch.empty_like(source)
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    maps = [
        TensorDescriptor.from_tensor(matrix, [32, 32], layout)
        for matrix in (source, target)
    ]
    yield box_scale_kernel, (3,), tuple(maps)
    assert torch.equal(target, 2 * source), "target: expected 2 * source"
