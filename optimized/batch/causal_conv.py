"""Causal convolution: the chunk of tokens that each program processes.

numpy builds both lists at once, padding included, and one copy moves them to the device.
"""

import numpy as np
import torch

from ...contract.argument_types import typed
from ...contract.causal_conv_chunks import (
    CONV_BLOCK_M,
    CONV_MIN_PROGRAMS,
    CausalConv1dChunks,
)
from ...contract.kinds import PAD_SLOT_ID
from ...contract.shapes import ProgramChunks, StartLoc
from ...validation.step_shapes import check_conv_starts


@typed
def compute_causal_conv1d_metadata(
    query_start_loc_p: StartLoc, device: torch.device | str = "cpu"
) -> tuple[dict[int, CausalConv1dChunks], ProgramChunks, ProgramChunks]:
    """Return the request and the chunk that each program processes."""
    check_conv_starts(query_start_loc_p)
    # step: divide each prompt into chunks
    nums = -(-np.diff(query_start_loc_p.numpy()) // CONV_BLOCK_M)
    # step: number the chunks of each prompt
    mlist = np.repeat(np.arange(len(nums)), nums)
    offsetlist = np.arange(len(mlist)) - (nums.cumsum() - nums)[mlist]
    # step: write both lists into padded buffers
    length = 2 * max(CONV_MIN_PROGRAMS, len(mlist))
    buffers = np.full((2, length), PAD_SLOT_ID, dtype=np.int32)
    buffers[:, : len(mlist)] = mlist, offsetlist
    sent = torch.from_numpy(buffers).to(device, non_blocking=True)
    batch_ptr, token_chunk_offset_ptr = sent.unbind()
    chunks = CausalConv1dChunks(
        nums=torch.from_numpy(nums),
        tot=len(mlist),
        mlist=torch.from_numpy(mlist),
        mlist_len=len(mlist),
        offsetlist=torch.from_numpy(offsetlist.astype(np.int32)),
        batch_ptr=batch_ptr,
        token_chunk_offset_ptr=token_chunk_offset_ptr,
    )
    return {CONV_BLOCK_M: chunks}, batch_ptr, token_chunk_offset_ptr
