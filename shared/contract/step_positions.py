"""Requests and positions of a step's tokens, from start locations and lengths on the device."""

import torch
from torch import Tensor


def step_positions(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the request and the position of each token, without a wait for the device.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        seq_lens: [reqs] tokens of each sequence, the new ones included.
        num_tokens: Rows of the step.

    Returns:
        [num_tokens] int64 requests, -1 for tokens past the last one; and [num_tokens] int64
        positions, below 0 where a request has more new tokens than its sequence has tokens.

    Example:
        Two of five tokens are new, and the last row is padding.

        >>> starts, lens = torch.tensor([0, 2]), torch.tensor([5])
        >>> [found.tolist() for found in step_positions(starts, lens, num_tokens=3)]
        [[0, 0, -1], [3, 4, -1]]
    """
    reqs = seq_lens.shape[0]
    token = torch.arange(num_tokens, device=seq_lens.device)
    if not reqs:
        return token * 0 - 1, token * 0 - 1
    ends = query_start_loc[1:].long()
    req = torch.searchsorted(ends, token, right=True)
    owner = req.clamp(max=reqs - 1)
    position = seq_lens[owner] - ends[owner] + token
    return torch.where(req < reqs, req, -1), torch.where(req < reqs, position, -1)
