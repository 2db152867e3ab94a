"""Reference sliding windows (R-SWA): the prompt stays visible, and a window limits the rest.

A model that transcribes a long document reads its prompt, an image, to the last token, and needs
few of the tokens that it has generated. So a key is visible if it is not after the query, and if it
is in the prompt or in the window. The blocks between the prompt and the window can be freed:
a request keeps as many tokens as its prompt and the window have.

Attention needs no further mask for this. The window is the option `sliding_window`, and the prompt
is a range of each token (`query_ranges`), which no window hides. A range hides no later key either,
so that of a token in the prompt ends at the token.

Source: vLLM's `rswa_prefix_lens` and `RSWASpec`; Unlimited-OCR, 2026.
"""

import torch

from ...contract.kinds import HOST
from ...contract.shapes import QueryRanges, StartLoc, TokenCounts
from ...validation import validated
from ...validation.step_ranges import check_rswa_query_ranges


@validated(check_rswa_query_ranges)
def fill_rswa_query_ranges(
    out: QueryRanges,
    rswa_prefix_lens: TokenCounts,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
) -> None:
    """Write the range of each new token that its window does not hide.

    All tensors are on one device, and the optimized twin does not wait for it. So a captured graph
    may contain the call, and reads the lengths of each replay.

    Args:
        out: [rows, 2] int32, modified in place: first and last position of the tokens of the
            prompt up to the new token; (-1, -1) if there are none, and in the rows after the new
            tokens.
        rswa_prefix_lens: [reqs] tokens of each sequence that stay visible, such as its prompt.
        query_start_loc: [reqs + 1] start of each request's new tokens.
        seq_lens: [reqs] tokens of each sequence, the new ones included.

    Raises:
        ValueError: tensors on several devices, or lengths of another number of requests; where
            contents are validated, too few rows, a negative prefix, or fewer tokens than new ones.

    Source:
        The mask of vLLM's backends with `supports_rswa` (0.30).

    Example:
        A prompt of 4 tokens. Positions 3, 4 and 5 are new; the first is the prompt's last.

        >>> out = torch.zeros(4, 2, dtype=torch.int32)
        >>> fill_rswa_query_ranges(
        ...     out,
        ...     torch.tensor([4], dtype=torch.int32),
        ...     torch.tensor([0, 3], dtype=torch.int32),
        ...     torch.tensor([6], dtype=torch.int32),
        ... )
        >>> out.tolist()
        [[0, 3], [0, 3], [0, 3], [-1, -1]]
    """
    found = torch.full((out.shape[0], 2), -1, dtype=torch.int32, device=HOST)
    starts = query_start_loc.tolist()
    lens = zip(rswa_prefix_lens.tolist(), seq_lens.tolist(), strict=True)
    for req, (prefix_len, seq_len) in enumerate(lens):
        for token in range(starts[req], starts[req + 1]):
            # step: find the position of each new token
            position = seq_len - (starts[req + 1] - token)
            # step: end the range with the prompt, or with the token
            last = min(prefix_len - 1, position)
            if last >= 0:
                found[token] = torch.tensor([0, last], dtype=torch.int32, device=HOST)
    out.copy_(found)
