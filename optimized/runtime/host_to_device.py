"""Copies of step metadata from the host to the device, in one transfer."""

from itertools import accumulate

import numpy as np
import torch

from ...contract.kinds import HOST


def send(
    arrays: list[np.ndarray], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the arrays as views of one host buffer and of its copy on the device.

    The slots come first: they are 64-bit, and the start of the buffer is aligned.
    Pinned memory returns to torch's pool only after the copy from it has finished.
    """
    sizes = [array.nbytes for array in arrays]
    ends = list(accumulate(sizes))
    buffer = torch.empty(
        ends[-1],
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
