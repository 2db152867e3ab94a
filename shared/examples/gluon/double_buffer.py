"""Gluon kernel: the sum of the rows of a matrix; the next row is copied while one is added."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# triton 3.8 renamed it
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def double_buffer_kernel(source, target, num_rows, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    buffers = gl.allocate_shared_memory(gl.float32, [2, COLUMNS], shared)
    column = gl.arange(0, COLUMNS, layout=layout)
    copy(buffers.index(0), source + column)
    async_copy.commit_group()
    total = gl.zeros([COLUMNS], gl.float32, layout)
    for row in range(num_rows):
        if row + 1 < num_rows:
            copy(buffers.index((row + 1) % 2), source + (row + 1) * COLUMNS + column)
        async_copy.commit_group()
        async_copy.wait_group(1)
        total += buffers.index(row % 2).load(layout)  # [COLUMNS]
    gl.store(target + column, total)
    async_copy.wait_group(0)


def launches():
    """Yield the launch, and compare its result."""
    source = torch.randint(-9, 9, (7, 512)).float()
    target = torch.empty(512)
    yield double_buffer_kernel, (1,), (source, target, 7, 512)
    assert torch.equal(target, source.sum(0)), "target: expected source.sum(0)"
