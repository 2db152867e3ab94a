"""Shared memory of the Hopper latent decode kernel, and the named barriers between its consumers.

p and alpha are written by consumer 0 and read by consumer 1. Two named barriers order this: 128
threads wait and the 128 threads of the other warpgroup arrive.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.pipeline import ARRIVE_PTX, WAIT_PTX, named_barrier
from .config import STAGES

# Triton numbers its own named barriers from 0, so the last 2 of 16 are taken.
P_FULL = gl.constexpr(14)
P_EMPTY = gl.constexpr(15)


class LatentStorage(NamedTuple):
    """Shared memory that the warps of a program have in common.

    Args:
        q_0, q_1: [boxes, box rows, BOX_COLUMNS] query columns of the halves.
        q_rope: the same of the rope columns.
        half_0, half_1: [boxes, box rows, BOX_COLUMNS] the stages of the value halves.
        rope: the same of the rope columns.
        p: [BLOCK_M, BLOCK_N] weights of one KV tile.
        alpha: [BLOCK_M] float32, by which the accumulator must be multiplied before P @ V.
        q_pipe: one stage.
        pipe_0: STAGES stages of half 0. If TMA loads them, one full barrier more, the last, is for
            a tile whose last rows must be cleared. Copied tiles have no such rows.
        pipe_1: the same of half 1 and the rope columns.
    """

    q_0: Any
    q_1: Any
    q_rope: Any
    half_0: Any
    half_1: Any
    rope: Any
    p: Any
    alpha: Any
    q_pipe: Any
    pipe_0: Any
    pipe_1: Any


@gluon.jit
def wait_for_part(pipe, state):
    """Wait until a part of a KV tile is in shared memory, and may be an operand of a product.

    Args:
        pipe: the ring of the part.
    """
    IS_COPIED: gl.constexpr = pipe.full.shape[0] == STAGES
    pipe.consumer_wait(state)
    if IS_COPIED:
        # written by threads, and read by the tensor cores through the async proxy
        fence_async_shared()


@gluon.jit
def p_full_wait():
    """Wait until p and alpha are in shared memory."""
    named_barrier(WAIT_PTX, P_FULL)


@gluon.jit
def p_full_arrive():
    """Signal that p and alpha are in shared memory."""
    named_barrier(ARRIVE_PTX, P_FULL)


@gluon.jit
def p_empty_wait():
    """Wait until p and alpha may be overwritten."""
    named_barrier(WAIT_PTX, P_EMPTY)


@gluon.jit
def p_empty_arrive():
    """Signal that p and alpha may be overwritten."""
    named_barrier(ARRIVE_PTX, P_EMPTY)
