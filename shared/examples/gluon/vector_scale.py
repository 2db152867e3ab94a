"""Gluon kernel: twice each element of a vector, whose length is not a multiple of the block."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def vector_scale_kernel(source, target, size, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    x = gl.load(source + offsets, mask=offsets < size)  # [BLOCK]
    gl.store(target + offsets, 2 * x, mask=offsets < size)


def launches():
    """Yield the launch, and compare its result."""
    source = torch.randn(1000)
    target = torch.empty_like(source)
    yield vector_scale_kernel, (4,), (source, target, 1000, 256)
    assert torch.equal(target, 2 * source), "target: expected 2 * source"
