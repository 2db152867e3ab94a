"""What does attention need to know about one step?

Everything is computed with numpy in one pinned buffer and sent to the device in one copy, which the
host does not wait for. The tensors of the metadata are views of that buffer and of its copy.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..shared.kinds import HOST
from ..shared.metadata_classes import CommonAttentionMetadata
from ..shared.refusals import check_block_rows
from .block_table import padded_rows
from .slot_mapping import compute_slot_mapping_batch


def build_common_attn_metadata(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> CommonAttentionMetadata:
    """Return one step's metadata from its requests, in the order they are given."""
    num_reqs = len(query_lens)
    # step: find the slots of the new tokens
    slot_mapping = compute_slot_mapping_batch(
        query_lens, num_computed_tokens, block_rows, block_size
    ).numpy()
    # step: pad the rows into one table
    max_blocks = max((len(row) for row in block_rows), default=0)
    check_block_rows(block_rows, max_blocks)
    block_table = padded_rows(block_rows, max_blocks)
    # step: add up where each request starts
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    # step: add up how long each sequence is
    computed = np.asarray(num_computed_tokens, dtype=np.int32)
    seq_lens = computed + np.asarray(query_lens, dtype=np.int32)
    # step: send everything to the device
    on_host, on_device = _send(
        [slot_mapping, query_start_loc, seq_lens, block_table], torch.device(device)
    )
    return CommonAttentionMetadata(
        query_start_loc=on_device[1],
        query_start_loc_cpu=on_host[1],
        seq_lens=on_device[2],
        seq_lens_cpu=on_host[2],
        num_computed_tokens_cpu=torch.from_numpy(computed),
        num_reqs=num_reqs,
        num_actual_tokens=len(slot_mapping),
        max_query_len=max(query_lens, default=0),
        max_seq_len=int(seq_lens.max(initial=0)),
        block_table_tensor=on_device[3],
        slot_mapping=on_device[0],
    )


def _send(
    arrays: list[np.ndarray], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the arrays as views of one host buffer and of its copy on the device.

    The slots come first: they are 64-bit, and so lie aligned at the start of the buffer.
    Pinned memory goes back to torch's pool only after the copy from it has run.
    """
    sizes = [array.nbytes for array in arrays]
    ends = np.cumsum(sizes)
    buffer = torch.empty(
        int(ends[-1]),
        dtype=torch.uint8,
        device=HOST,
        pin_memory=device.type == "cuda",
    )
    raw = buffer.numpy()
    for array, size, end in zip(arrays, sizes, ends, strict=True):
        raw[end - size : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copies = []
    for place in (buffer, buffer.to(device, non_blocking=True)):
        copies.append(
            [
                place[end - size : end]
                .view(torch.from_numpy(array).dtype)
                .view(array.shape)
                for array, size, end in zip(arrays, sizes, ends, strict=True)
            ]
        )
    return copies[0], copies[1]
