"""Causal convolution: the chunk of tokens that each program processes.

A causal convolution (the short one in Mamba layers) runs over each prompt by itself, in chunks of 8
tokens, one program a chunk. A program is only a number, so two lists tell it who it is: the request
of its chunk, and the chunk's number within the request. The lists are longer than needed, so that
most steps can use the same buffers; programs that find the padding have nothing to do.
"""

import torch

from ...contract.causal_conv_chunks import (
    CONV_BLOCK_M,
    CONV_MIN_PROGRAMS,
    CausalConv1dChunks,
)
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.shapes import ProgramChunks, StartLoc
from ...validation.step_shapes import check_conv_starts


def compute_causal_conv1d_metadata(
    query_start_loc_p: StartLoc, device: torch.device | str = "cpu"
) -> tuple[dict[int, CausalConv1dChunks], ProgramChunks, ProgramChunks]:
    """Return which request and which of its chunks each program works on.

    Args:
        query_start_loc_p: [reqs + 1] where each prompt's new tokens start, on the host.
        device: where the convolution runs.

    Returns:
        Chunk size -> everything about chunks of that size (only 8 so far), then its `batch_ptr`
        and its `token_chunk_offset_ptr` once more: [programs] int32 on the device, PAD_SLOT_ID
        behind the chunks, twice as long as there are chunks, at least 2048.

    Raises:
        ValueError: starts on a device, or starts that fall.

    Source:
        vLLM's function of that name, which fetches the starts from the device.

    Example:
        Prompts of 8 and 17 tokens: one chunk of 8 and three.

        >>> chunks, request, offset = compute_causal_conv1d_metadata(
        ...     torch.tensor([0, 8, 25], dtype=torch.int32)
        ... )
        >>> request[:5].tolist(), offset[:5].tolist()
        ([0, 1, 1, 1, -1], [0, 0, 1, 2, -1])
        >>> chunks[8]["nums"]
        tensor([1, 3], dtype=torch.int32)
    """
    check_conv_starts(query_start_loc_p)
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
