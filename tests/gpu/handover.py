"""Small kernels that pass numbers between warps, to be run under compute-sanitizer.

    compute-sanitizer --tool racecheck python tests/gpu/handover.py mbarriers
    compute-sanitizer --tool racecheck python tests/gpu/handover.py named

The numbers pass through shared memory, ordered by two mbarriers or by two named barriers. Both
patterns are correct: what the tool reports about them, it also reports about correct kernels of
Hopper.
"""

import sys

import torch
from pagetwin.optimized.kernels.sm90.latent.sync import (
    p_empty_arrive,
    p_empty_wait,
    p_full_arrive,
    p_full_wait,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

TURNS = gl.constexpr(6)
ROWS = gl.constexpr(128)
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
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


@gluon.jit
def _write_rows(row, out):
    rows: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for turn in range(TURNS):
        p_empty_wait()
        row.store(gl.full([ROWS], turn, gl.int32, rows))
        p_full_arrive()
    p_empty_wait()


@gluon.jit
def _read_rows(row, out):
    rows: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = gl.full([ROWS], 0, gl.int32, rows)
    p_empty_arrive()
    for _ in range(TURNS):
        p_full_wait()
        total += row.load(rows)
        p_empty_arrive()
    gl.store(out + gl.arange(0, ROWS, rows), total)


@gluon.jit
def named_barriers_kernel(out):
    """Pass TURNS rows from four warps to four others, which add them up."""
    row = gl.allocate_shared_memory(gl.int32, [ROWS], ROW)
    gl.warp_specialize([(_write_rows, (row, out)), (_read_rows, (row, out))], [4], [64])


def main() -> None:
    """Pass the numbers, and check what arrived."""
    kernel = {"mbarriers": hand_over_kernel, "named": named_barriers_kernel}[
        sys.argv[1]
    ]
    out = torch.zeros(ROWS.value, dtype=torch.int32, device="cuda")
    kernel[(1,)](out, num_warps=4)
    right = sum(range(TURNS.value))
    assert out[0].item() == right
    assert kernel is hand_over_kernel or (out == right).all()
    print("done", sys.argv[1])


if __name__ == "__main__":
    main()
