"""Reference sliding windows (R-SWA): the prompt stays visible, and a window limits the rest.

A few operations of torch on the device of the lengths. None of them waits for it, and no address
depends on the values, so a captured CUDA graph may contain them.
"""

import torch

from ...contract.argument_types import typed
from ...contract.shapes import QueryRanges, StartLoc, TokenCounts
from ...validation import values_checked
from ...validation.step_ranges import check_rswa_query_ranges


@typed
def fill_rswa_query_ranges(
    out: QueryRanges,
    rswa_prefix_lens: TokenCounts,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
) -> None:
    """Write the range of each new token that its window does not hide."""
    check_rswa_query_ranges(
        out,
        rswa_prefix_lens,
        query_start_loc,
        seq_lens,
        contents=values_checked(seq_lens),
    )
    if not out.shape[0]:
        return
    if not seq_lens.shape[0]:
        out.fill_(-1)
        return
    token = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    req = torch.searchsorted(query_start_loc[1:], token, right=True)
    is_new = req < seq_lens.shape[0]
    req = req.clamp(max=seq_lens.shape[0] - 1)
    # step: find the position of each new token
    position = seq_lens[req] - query_start_loc[1:][req] + token
    # step: end the range with the prompt, or with the token
    last = torch.minimum(rswa_prefix_lens[req] - 1, position)
    is_range = is_new & (last >= 0)
    out[:, 0] = torch.where(is_range, 0, -1)
    out[:, 1] = torch.where(is_range, last, -1)
