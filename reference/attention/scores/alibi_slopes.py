"""ALiBi: slope * (key position - query position) is added to the score.

Source: Press et al., "Train Short, Test Long", ICLR 2022.
"""

from torch import Tensor

from ..requests.request import RequestView


def modify(scores: Tensor, alibi_slopes: Tensor, request: RequestView) -> Tensor:
    """Return [query_heads, queries, keys], scores with a bias that falls with the distance.

    Args:
        scores: [query_heads, queries, keys].
        alibi_slopes: [query_heads].
        request: Gives the positions.
    """
    return scores + alibi_slopes.to(scores.dtype)[:, None, None] * request.distance
