"""Constants of the Hopper prefill kernel: tile shape, pipeline depth, registers, layouts.

All figures are of an H200 with triton 3.6, bfloat16 and blocks of 16 tokens, unless they say
otherwise. "1 x 8,192" is one prompt of 8,192 tokens with 32 query heads and a causal mask.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPGROUP_M = gl.constexpr(64)
"""Query rows per consumer warpgroup: the M of one wgmma instruction."""
BLOCK_N = gl.constexpr(128)
"""Keys per KV tile, the widest tile that was measured. The dot products of a warpgroup with it
take 64 registers per thread."""
BOX_COLUMNS = gl.constexpr(64)
"""Elements per row of a TMA box of K or V: 128 bytes, the widest swizzle."""
SWIZZLE_ROWS = gl.constexpr(8)
"""Rows after which the 128-byte swizzle repeats."""
WARP_SIZE = gl.constexpr(32)
MAX_CONSUMERS = gl.constexpr(3)
LN_2 = gl.constexpr(math.log(2.0))

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
"""Shared-memory layout of all tiles: 16-bit elements, 128-byte swizzle."""
SWIZZLED_32_BIT = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
"""The same bytes seen as 32-bit words."""
LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
"""Shared-memory layout of a vector."""


@gluon.constexpr_function
def count_consumers(head_dim):
    """Return the number of consumer warpgroups, each with WARPGROUP_M rows.

    With a head size of 64 a third warpgroup fits: 1,276 us with three and 1,393 us with two for
    1 x 8,192 in an early version of the kernel.
    """
    return 3 if head_dim == 64 else 2


@gluon.constexpr_function
def count_stages(head_dim):
    """Return the number of K tiles, and of V tiles, in flight.

    Three warpgroups that take turns (`uses_ping_pong`) hold a stage longer than two that do not.
    """
    return 3 if head_dim == 64 else 2


@gluon.constexpr_function
def uses_ping_pong(head_dim):
    """Return whether the consumer warpgroups take turns at the tensor cores.

    Without turns, three warpgroups start together: all want the tensor cores first and the
    exponential units afterwards. Turns and a third stage save 3.6 % of the time of 1 x 8,192, and
    8 % of 32 x 1,500 tokens without a mask. The two warpgroups of head size 128 lose 6 % by it:
    each of them has the registers to overlap its own softmax with its own P @ V.
    """
    return head_dim == 64


@gluon.constexpr_function
def consumer_registers(head_dim):
    """Return the registers per thread of the consumer warpgroups after the first.

    The first warpgroup gets what is left, which is as much. The split decides the speed: at head
    size 64, 152 for consumers and 40 for producers is 45 % slower than 160 and 24.
    """
    return 160 if head_dim == 64 else 240


PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers per thread of a producer warp: the fewest that setmaxnreg allows."""


@gluon.constexpr_function
def qk_layout():
    """Return the register layout of qk and p of a warpgroup, [WARPGROUP_M, BLOCK_N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 16])


@gluon.constexpr_function
def acc_layout(head_dim):
    """Return the register layout of a warpgroup's accumulator, [WARPGROUP_M, HEAD_DIM]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])


@gluon.constexpr_function
def p_operand_layout(head_dim):
    """Return the register layout of p as the left operand of P @ V."""
    return gl.DotOperandLayout(0, acc_layout(head_dim), k_width=2)


@gluon.constexpr_function
def warp_layout(num_warps):
    """Return the register layout of a vector of 32 elements, one per lane of a warp."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])
