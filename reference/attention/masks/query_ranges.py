"""Query ranges: a query attends to a range of keys whatever the other masks say.

The tokens of an image attend to each other in both directions, in a prompt that is causal.

Source: vLLM's `mm_prefix_range`; Gemma 3, 2025.
"""

from torch import Tensor

from ..requests.request import RequestView


def also_visible(query_ranges: Tensor, request: RequestView) -> Tensor:
    """Return [queries, keys]: first <= key position <= last.

    Args:
        query_ranges: [tokens, 2] first and last position; a negative first means no range.
        request: Its rows are looked up.
    """
    first, last = query_ranges[request.rows].T[:, :, None]  # [queries, 1] each
    key_position = request.key_position[None, :]
    visible: Tensor = (first >= 0) & (first <= key_position) & (key_position <= last)
    return visible
