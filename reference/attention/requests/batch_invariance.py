"""Batch invariance: each query is computed alone, over its visible keys and no others.

A matrix product may add its terms in another order when its shape changes, so the last bits of a
row depend on the other rows and on masked keys. A product of one row over the same keys does not.
"""

from collections.abc import Iterator
from dataclasses import replace

from ....contract.attention_options import AttentionOptions
from ..masks import visible_keys
from .request import Request


def one_request_per_query(
    request: Request, options: AttentionOptions
) -> Iterator[Request]:
    """Yield each query as a request of its own, over the keys that it attends to."""
    first = request.rows.start
    for row, visible in enumerate(visible_keys(request, options)):
        tree = request.tree
        if tree is not None:
            tree = tree[row : row + 1, visible[-len(tree) :]]
        yield replace(
            request,
            rows=slice(first + row, first + row + 1),
            keys=request.keys[visible],
            query_position=request.query_position[row : row + 1],
            key_position=request.key_position[visible],
            tree=tree,
        )
