"""Causal convolution: the chunk of tokens that each program processes.

The short causal convolution of Mamba layers runs over each prompt separately, in chunks of 8
tokens, one program per chunk. Two lists, indexed by the program, give the request of its chunk and
the index of the chunk within the request. The lists are longer than needed, so that most steps can
use the same buffers. Programs with a padding entry return at once.
"""

import torch

from ...contract.causal_conv_chunks import (
    CONV_BLOCK_M,
    CONV_MIN_PROGRAMS,
    CausalConv1dChunks,
)
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.shapes import ProgramChunks, StartLoc
from ...validation import validated
from ...validation.step_shapes import check_conv_starts


@validated(check_conv_starts)
def compute_causal_conv1d_metadata(
    query_start_loc_p: StartLoc, device: torch.device | str = "cpu"
) -> tuple[dict[int, CausalConv1dChunks], ProgramChunks, ProgramChunks]:
    """Return the request and the chunk that each program processes.

    Args:
        query_start_loc_p: [reqs + 1] start of each prompt's new tokens, on the host.
        device: device of the convolution.

    Returns:
        Chunk size -> all data of chunks of that size (only 8 so far), then its `batch_ptr` and
        its `token_chunk_offset_ptr` again: [programs] int32 on the device, padded with
        PAD_SLOT_ID to twice the number of chunks, at least to 2048.

    Raises:
        ValueError: the starts are not on the host, or they decrease.

    Source:
        vLLM's function of that name.

    Example:
        Prompts of 8 and 17 tokens have one chunk and three.

        >>> chunks, request, offset = compute_causal_conv1d_metadata(
        ...     torch.tensor([0, 8, 25], dtype=torch.int32)
        ... )
        >>> request[:5].tolist(), offset[:5].tolist()
        ([0, 1, 1, 1, -1], [0, 0, 1, 2, -1])
        >>> chunks[8]["nums"]
        tensor([1, 3], dtype=torch.int32)
    """
    nums, requests, offsets = [], [], []
    for req, query_len in enumerate(query_start_loc_p.diff().tolist()):
        # step: divide each prompt into chunks
        num_chunks = -(-query_len // CONV_BLOCK_M)
        nums.append(num_chunks)
        # step: number the chunks of each prompt
        for offset in range(num_chunks):
            requests.append(req)
            offsets.append(offset)
    # step: write both lists into padded buffers
    length = 2 * max(CONV_MIN_PROGRAMS, len(requests))
    batch_ptr, token_chunk_offset_ptr = (
        torch.full((length,), PAD_SLOT_ID, dtype=torch.int32, device=device)
        for _ in range(2)
    )
    mlist = torch.tensor(requests, dtype=torch.int64, device=HOST)
    offsetlist = torch.tensor(offsets, dtype=torch.int32, device=HOST)
    batch_ptr[: len(mlist)] = mlist
    token_chunk_offset_ptr[: len(offsetlist)] = offsetlist
    chunks = CausalConv1dChunks(
        nums=torch.tensor(nums, dtype=torch.int32, device=HOST),
        tot=len(requests),
        mlist=mlist,
        mlist_len=len(requests),
        offsetlist=offsetlist,
        batch_ptr=batch_ptr,
        token_chunk_offset_ptr=token_chunk_offset_ptr,
    )
    return {CONV_BLOCK_M: chunks}, batch_ptr, token_chunk_offset_ptr
