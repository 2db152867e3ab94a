"""A small kernel that passes numbers from one warp to others, to be run under compute-sanitizer.

    compute-sanitizer --tool racecheck python tests/gpu/handover.py

The numbers pass through shared memory and two mbarriers. The pattern is correct: what the tool
reports about it, it also reports about correct kernels of Hopper.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

TURNS = gl.constexpr(6)
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def _hand_over(line, full, free):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for turn in range(TURNS):
        mbarrier.wait(free, (turn & 1) ^ 1)
        line.store(gl.full([1], turn, gl.int32, one))
        mbarrier.arrive(full, count=1)


@gluon.jit
def _take_over(line, full, free, out):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = gl.to_tensor(0)
    for turn in range(TURNS):
        mbarrier.wait(full, turn & 1)
        total += gl.max(line.load(one), 0)
        mbarrier.arrive(free, count=1)
    gl.store(out, total)


@gluon.jit
def hand_over_kernel(out):
    """Hand the numbers below TURNS over from one warp to four, which add them up."""
    line = gl.allocate_shared_memory(gl.int32, [1], LINE)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_take_over, (line, full, free, out)),
            (_hand_over, (line, full, free)),
        ],
        [1],
        [24],
    )


def main() -> None:
    """Hand over, and check what arrived."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](out, num_warps=4)
    assert out.item() == sum(range(TURNS.value))
    print("done")


if __name__ == "__main__":
    main()
