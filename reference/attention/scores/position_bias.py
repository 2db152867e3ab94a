"""Position bias: an entry of a table, chosen by key position - query position, is added.

Source: Raffel et al., "Exploring the Limits of Transfer Learning" (T5), JMLR 2020, section 2.1.
"""

from torch import Tensor

from ..requests.request import Request


def modify(scores: Tensor, position_bias: Tensor, request: Request) -> Tensor:
    """Return [query_heads, queries, keys], scores with the bias of their distance.

    Args:
        scores: [query_heads, queries, keys].
        position_bias: [query_heads, 2 * reach + 1]; entry reach + d is for distance d. Distances
            beyond the reach use the outermost entries.
        request: Gives the positions.
    """
    reach = position_bias.shape[1] // 2
    entry = request.distance.clamp(-reach, reach) + reach
    return scores + position_bias[:, entry].to(scores.dtype)
