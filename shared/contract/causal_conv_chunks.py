"""The chunks of a causal convolution."""

from typing import TypedDict

from torch import Tensor

CONV_BLOCK_M = 8
"""Tokens per chunk, which one program processes."""

CONV_MIN_PROGRAMS = 1024
"""Smallest capacity of the buffers in chunks, so that their size seldom changes."""


class CausalConv1dChunks(TypedDict):
    """The prompts of a step, divided into chunks (the keys are vLLM's).

    Args:
        nums: [reqs] int32 chunks of each request.
        tot: chunks of the step.
        mlist: [chunks] int64 request of each chunk.
        mlist_len: the length of `mlist`.
        offsetlist: [chunks] int32 index of each chunk within its request.
        batch_ptr: [programs] int32 on the device: `mlist`, then PAD_SLOT_ID.
        token_chunk_offset_ptr: [programs] int32 on the device: `offsetlist`, then PAD_SLOT_ID.
    """

    nums: Tensor
    tot: int
    mlist: Tensor
    mlist_len: int
    offsetlist: Tensor
    batch_ptr: Tensor
    token_chunk_offset_ptr: Tensor
