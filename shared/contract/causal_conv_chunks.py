"""What does a causal convolution need to know about its prompts?"""

from typing import TypedDict

from torch import Tensor

CONV_BLOCK_M = 8
"""Tokens of one chunk, the work of one program."""

CONV_MIN_PROGRAMS = 1024
"""Chunks for which there is room in every step, so that buffers seldom change their size."""


class CausalConv1dChunks(TypedDict):
    """The prompts of a step, cut into chunks (the keys are vLLM's).

    Args:
        nums: [reqs] int32 chunks of each request.
        tot: chunks of the step.
        mlist: [chunks] int64 request of each chunk.
        mlist_len: the length of `mlist`.
        offsetlist: [chunks] int32 number of each chunk within its request.
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
