"""Constants of the Hopper latent decode kernel: tile shape, stages, registers, layouts.

A latent vector has 512 elements that are both key and value, and 64 rope elements that are key
only. A KV tile is stored in shared memory in three parts: the value columns of consumer 0, those of
consumer 1, and the rope columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RANK = gl.constexpr(512)
"""Elements of a latent vector that are key and value: kv_lora_rank."""
ROPE_DIM = gl.constexpr(64)
"""Elements of a latent vector that are key only: qk_rope_head_dim."""
WIDTH = gl.constexpr(RANK.value + ROPE_DIM.value)
HALF = gl.constexpr(256)
"""Value columns per consumer warpgroup. Its accumulator takes 128 registers per thread."""
BLOCK_M = gl.constexpr(64)
"""Query rows per tile: query tokens times heads. The M of one wgmma instruction."""
BLOCK_N = gl.constexpr(64)
"""Keys per KV tile. Q, two stages of KV tiles and P take 224 of 227 KiB of shared memory."""
STAGES = gl.constexpr(2)
"""KV tiles in shared memory."""
BOX_COLUMNS = gl.constexpr(64)
"""Elements per row of a TMA box: 128 bytes, the widest swizzle."""
HALF_BOXES = gl.constexpr(4)
"""Column boxes of a half."""
REQS_PER_PASS = gl.constexpr(256)
"""Requests whose tiles are counted at once, by every warp for itself."""
REQS_PER_SHORT_PASS = gl.constexpr(32)
"""The same while the tiles are computed, when fewer registers are free."""

CONSUMER_REGISTERS = gl.constexpr(200)
"""Registers per thread of consumer 1. Consumer 0 gets what is left, which is more."""
PRODUCER_REGISTERS = gl.constexpr(56)
"""Registers per thread of the producer's warps."""
COPY_WARPS = gl.constexpr(4)
"""Warps of a producer that copies rows. One that loads by TMA is a single warp."""


@gluon.constexpr_function
def qk_layout():
    """Return the register layout of qk and p, [BLOCK_M, BLOCK_N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 16])


@gluon.constexpr_function
def acc_layout():
    """Return the register layout of a consumer's accumulator, [BLOCK_M, HALF]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16])


@gluon.constexpr_function
def p_operand_layout():
    """Return the register layout of p as the left operand of P @ V."""
    return gl.DotOperandLayout(0, acc_layout(), k_width=2)


@gluon.constexpr_function
def copy_layout():
    """Return the register layout of the addresses of a part of a KV tile, [BLOCK_N, columns].

    A thread has 16 bytes of each box of four rows.
    """
    return gl.BlockedLayout([1, 8], [4, 8], [COPY_WARPS.value, 1], [1, 0])
