"""What the stream-K partitions of the Hopper kernels have in common.

The KV tiles of all requests are concatenated and divided into segments, one per program.
portable/stream_k.py has the same partition for the portable kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...portable.stream_k import choose_length

__all__ = ["MIN_TILES", "add", "ceil_div", "choose_length", "requests_layout"]
MIN_TILES = gl.constexpr(2)
"""KV tiles of a segment, at least: a shorter one is not worth a combination."""


@gluon.constexpr_function
def requests_layout(reqs, num_warps):
    """Return the register layout of `reqs` requests: each warp has all of them.

    Reductions then need no exchange between warps.
    """
    return gl.BlockedLayout([reqs // 32], [32], [num_warps], [0])


@gluon.jit
def add(a, b):
    """Return the sum of two numbers, for a scan."""
    return a + b


@gluon.jit
def ceil_div(a, b):
    """Return a / b, rounded up."""
    return (a + b - 1) // b
