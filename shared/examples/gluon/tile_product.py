"""Gluon kernel for Hopper: one tile of a matrix product, computed by the tensor cores."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# triton 3.8 renamed it
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def tile_product_kernel(a, b, target, num_tiles):
    BLOCK_M: gl.constexpr = a.block_type.shape[0]
    BLOCK_K: gl.constexpr = a.block_type.shape[1]
    BLOCK_N: gl.constexpr = b.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    a_tile = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    b_tile = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for tile in range(num_tiles):
        mbarrier.expect(loaded, a.block_type.nbytes + b.block_type.nbytes)
        async_load(a, [0, tile * BLOCK_K], loaded, a_tile)
        async_load(b, [tile * BLOCK_K, 0], loaded, b_tile)
        mbarrier.wait(loaded, tile & 1)
        acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    gl.store(target + row[:, None] * BLOCK_N + column[None, :], acc)


def launches():
    """Yield the launch, and compare its result."""
    a, b = (
        torch.randint(-3, 3, (64, 192)).half(),
        torch.randint(-3, 3, (192, 64)).half(),
    )
    target = torch.empty(64, 64)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    maps = [TensorDescriptor.from_tensor(matrix, [64, 64], layout) for matrix in (a, b)]
    yield tile_product_kernel, (1,), (*maps, target, 3)
    assert torch.equal(target, a.float() @ b.float()), "target: expected a @ b"
