"""Puzzle 5: the mask of a sliding window."""

from collections.abc import Callable, Iterator

from torch import Tensor

from ..puzzle import Case, Function, Hint, Puzzle
from .masks import by_rule, mask_of

TEMPLATE = '''\
"""Puzzle 5: the sliding window.

With a sliding window of w, a token attends to the last w tokens up to and including itself.
"""

import torch
from torch import Tensor


def sliding_window(query_len: int, kv_len: int, window: int) -> Tensor:
    """Return which keys each new token attends to: causal, and inside the window.

    Args:
        query_len: new tokens, the last ones of the sequence.
        kv_len: tokens of the sequence, at least query_len.
        window: maximum number of keys per query, at least 1.

    Returns:
        [query_len, kv_len] bool, True where the query attends to the key.

    Example:
        Query 0 is at position 3. A window of 2 leaves the positions 2 and 3.

        >>> sliding_window(query_len=2, kv_len=5, window=2).int()
        tensor([[0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    raise NotImplementedError
'''


def right(query_len: int, kv_len: int, window: int) -> Tensor:
    """Return the mask of the oracle."""
    return mask_of(query_len, kv_len, window)


def cases() -> Iterator[Case]:
    """Yield all lengths up to 5 tokens with windows of 1 to 6, the smallest first."""
    for kv_len in range(1, 6):
        for query_len in range(1, kv_len + 1):
            for window in range(1, kv_len + 2):
                yield {"query_len": query_len, "kv_len": kv_len, "window": window}
    yield {"query_len": 0, "kv_len": 3, "window": 2}


def rule(is_visible: Callable[[int, int, int, int], bool]) -> Function:
    """Return a wrong answer from a rule on (query, key, context, window)."""

    def wrong(query_len: int, kv_len: int, window: int) -> Tensor:
        context = kv_len - query_len
        return by_rule(
            query_len,
            kv_len,
            lambda query, key: is_visible(query, key, context, window),
        )

    return wrong


PUZZLE = Puzzle(
    number=5,
    name="sliding_window",
    title="the mask of a sliding window",
    page="options",
    template=TEMPLATE,
    results={"mask": ("query", "key")},
    cases=cases,
    right=right,
    has_strides=False,
    hints=(
        Hint(
            "window_too_wide",
            "A query attends to one key too many at the far end. The token itself is one of"
            " the `window` keys. Check < and <= of the distance.",
            rule(
                lambda query, key, context, window: 0 <= query + context - key <= window
            ),
        ),
        Hint(
            "window_too_narrow",
            "A query attends to one key too few. A window of 1 leaves the token itself, at"
            " distance 0.",
            rule(
                lambda query, key, context, window: (
                    0 <= query + context - key < window - 1
                )
            ),
        ),
        Hint(
            "context",
            "The distance is counted between positions. Query 0 is at position kv_len -"
            " query_len, not at position 0.",
            rule(lambda query, key, context, window: 0 <= query - key < window),
        ),
        Hint(
            "context_in_window",
            "The causal limit is right, but the far end of the window uses the index of the"
            " query instead of its position.",
            rule(
                lambda query, key, context, window: (
                    key <= query + context and query - key < window
                )
            ),
        ),
        Hint(
            "future",
            "The window also reaches into the future. This mask is causal: no key after the"
            " query.",
            rule(
                lambda query, key, context, window: abs(query + context - key) < window
            ),
        ),
        Hint(
            "no_causal",
            "The far end of the window is right, but keys after the query are visible.",
            rule(lambda query, key, context, window: query + context - key < window),
        ),
        Hint(
            "no_window",
            "This is the causal mask of puzzle 4. Keys that are too far back must be masked"
            " too.",
            rule(lambda query, key, context, window: key <= query + context),
        ),
        Hint(
            "inverted",
            "True and False are exchanged. True means that the query attends to the key.",
            rule(
                lambda query, key, context, window: (
                    not 0 <= query + context - key < window
                )
            ),
        ),
    ),
    idea="The distance of a key is the position of the query minus the position of the key."
    " Which distances are visible with window 1? With window 2?",
)
