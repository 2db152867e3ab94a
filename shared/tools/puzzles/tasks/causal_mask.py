"""Puzzle 4: the causal mask of new tokens that have a context."""

from collections.abc import Callable, Iterator

from torch import Tensor

from ..puzzle import Case, Function, Hint, Puzzle
from .masks import by_rule, mask_of

TEMPLATE = '''\
"""Puzzle 4: the causal mask with context.

A step computes the last query_len tokens of a sequence of kv_len tokens. The tokens before
them, the context, are in the cache. A token attends to itself and to all tokens before it.
"""

import torch
from torch import Tensor


def causal_mask(query_len: int, kv_len: int) -> Tensor:
    """Return which keys each new token attends to.

    Args:
        query_len: new tokens. Query 0 is the first of them.
        kv_len: tokens of the sequence, at least query_len. Key 0 is the first of all.

    Returns:
        [query_len, kv_len] bool, True where the query attends to the key.

    Example:
        4 tokens, of which the last 2 are new: query 0 is at position 2, query 1 at
        position 3.

        >>> causal_mask(query_len=2, kv_len=4).int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    raise NotImplementedError
'''


def cases() -> Iterator[Case]:
    """Yield every pair of lengths up to 5 tokens, the smallest first."""
    for kv_len in range(1, 6):
        for query_len in range(1, kv_len + 1):
            yield {"query_len": query_len, "kv_len": kv_len}
    for kv_len in (0, 3):
        yield {"query_len": 0, "kv_len": kv_len}


def rule(is_visible: Callable[[int, int, int], bool]) -> Function:
    """Return a wrong answer from a rule on (query, key, context)."""

    def wrong(query_len: int, kv_len: int) -> Tensor:
        context = kv_len - query_len
        return by_rule(
            query_len, kv_len, lambda query, key: is_visible(query, key, context)
        )

    return wrong


PUZZLE = Puzzle(
    number=4,
    name="causal_mask",
    title="the causal mask with context",
    page="concepts/paged_attention",
    template=TEMPLATE,
    results={"mask": ("query", "key")},
    cases=cases,
    right=mask_of,
    has_strides=False,
    hints=(
        Hint(
            "itself",
            "A token attends to itself too. Compare the two positions with <= instead of <.",
            rule(lambda query, key, context: key < query + context),
        ),
        Hint(
            "context",
            "Query 0 is not at position 0. The context comes before it, so its position is"
            " kv_len - query_len.",
            rule(lambda query, key, context: key <= query),
        ),
        Hint(
            "future",
            "Each query attends to one key too many, the next token. That one is not"
            " generated yet.",
            rule(lambda query, key, context: key <= query + context + 1),
        ),
        Hint(
            "inverted",
            "True and False are exchanged. Here True means that the query attends to the key."
            " Some libraries use the opposite meaning.",
            rule(lambda query, key, context: key > query + context),
        ),
        Hint(
            "reversed",
            "The comparison has the wrong direction: these keys come after the query.",
            rule(lambda query, key, context: key >= query + context),
        ),
        Hint(
            "no_mask",
            "All keys are visible. New tokens are computed together, and an early one must not"
            " attend to a later one.",
            rule(lambda query, key, context: True),
        ),
        Hint(
            "context_only",
            "Among the new tokens, a query attends to the earlier ones as well.",
            rule(lambda query, key, context: key < context or key == query + context),
        ),
    ),
    idea="Write down the position of each query and of each key, both counted from the start of"
    " the sequence. Then compare the two positions.",
)
