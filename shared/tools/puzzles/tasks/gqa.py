"""Puzzle 7: grouped-query attention."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..puzzle import Case, Function, Hint, Puzzle, counted, small_numbers
from .attention import attend

TEMPLATE = '''\
"""Puzzle 7: grouped-query attention (GQA).

There are more query heads than KV heads. Consecutive query heads share one KV head: with 4
query heads and 2 KV heads, query heads 0 and 1 use KV head 0, and 2 and 3 use KV head 1.
"""

import torch
from torch import Tensor


def gqa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return attention of all queries to all keys, without a mask.

    The tensors may have any strides: they need not be contiguous.

    Args:
        query: [tokens, query_heads, head_size].
        key: [keys, kv_heads, head_size]. query_heads is a multiple of kv_heads.
        value: [keys, kv_heads, head_size].
        scale: factor of the scores.

    Returns:
        [tokens, query_heads, head_size]. Per token and head: the score of a key is scale
        times the dot product of query and key; softmax over the keys gives the weights; the
        output is the weighted average of the values.

    Example:
        1 query, 2 query heads, 1 KV head, 2 keys with the values 8 and 4. Head 0 has query
        0, so both scores are 0 and the weights are 1/2, 1/2: output 6. Head 1 has query 2.
        Its scores are 0.5 * 2 * 0 = 0 and 0.5 * 2 * 1.0986 = 1.0986, so the weights are
        1/4 and 3/4: output 5.

        >>> query = torch.tensor([[[0.0], [2.0]]])
        >>> key = torch.tensor([[[1.0]], [[3.0]]]).log()
        >>> value = torch.tensor([[[8.0]], [[4.0]]])
        >>> gqa(query, key, value, scale=0.5)
        tensor([[[6.],
                 [5.]]])
    """
    raise NotImplementedError
'''


def cases() -> Iterator[Case]:
    """Yield small shapes: up to 2 tokens, 3 keys, 2 KV heads with 1 to 3 queries each."""
    shapes = [
        (tokens, keys, kv_heads, group, size)
        for tokens in (1, 2)
        for keys in (1, 2, 3)
        for kv_heads in (1, 2)
        for group in (1, 2, 3)
        for size in (1, 2)
    ]
    for number, (tokens, keys, kv_heads, group, size) in enumerate(
        sorted(shapes, key=lambda shape: torch.Size(shape).numel())
    ):
        yield {
            "query": small_numbers(tokens, kv_heads * group, size, seed=number, low=1),
            "key": small_numbers(keys, kv_heads, size, seed=1000 + number),
            "value": counted(keys, kv_heads, size),
            "scale": 0.5,
        }


def right(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the oracle's output."""
    return attend(query, key, value, scale)[0]


def by_head(choose: Callable[[int, int, int], int]) -> Function:
    """Return a wrong answer in which query heads use other KV heads.

    Args:
        choose: The KV head, from (query head, query heads, KV heads).
    """

    def wrong(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, kv_heads = query.shape[1], key.shape[1]
        used = [choose(head, heads, kv_heads) for head in range(heads)]
        return right(query, key[:, used], value[:, used], scale)

    return wrong


def scaled(change: Callable[[float, int], float]) -> Function:
    """Return a wrong answer with another scale, from the scale and the head size."""

    def wrong(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return right(query, key, value, change(scale, query.shape[2]))

    return wrong


def weighted(weights_of: Callable[[Tensor], Tensor]) -> Function:
    """Return a wrong answer with other weights, from the scores [heads, tokens, keys]."""

    def wrong(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(group, 1) for states in (key, value))
        scores = scale * torch.einsum("qhd,khd->hqk", query, key)
        return torch.einsum("hqk,khd->qhd", weights_of(scores), value)

    return wrong


def scaled_weights(**case: Any) -> Tensor:
    """Scale the output instead of the scores."""
    found = right(**(case | {"scale": 1.0}))
    return found * float(case["scale"])


PUZZLE = Puzzle(
    number=7,
    name="gqa",
    title="grouped-query attention",
    page="ideas/gqa",
    template=TEMPLATE,
    results={"output": ("token", "head", "element")},
    cases=cases,
    right=right,
    hints=(
        Hint(
            "head_order",
            "The KV heads were repeated as a whole: 0 1 0 1. Consecutive query heads share a"
            " KV head: 0 0 1 1.",
            by_head(lambda head, heads, kv_heads: head % kv_heads),
        ),
        Hint(
            "one_kv_head",
            "All query heads use KV head 0. Each group of query heads has a KV head of its"
            " own.",
            by_head(lambda head, heads, kv_heads: 0),
        ),
        Hint(
            "scale_divided",
            "The scores were divided by the scale. It is a factor: multiply by it.",
            scaled(lambda scale, size: 1 / scale),
        ),
        Hint(
            "scale_missing",
            "The weights are those of scale 1. The scores are multiplied by the scale before"
            " the softmax.",
            scaled(lambda scale, size: 1.0),
        ),
        Hint(
            "scale_default",
            "The scale was computed from the head size. Here it is an argument.",
            scaled(lambda scale, size: size**-0.5),
        ),
        Hint(
            "scale_late",
            "The scale was applied after the softmax. It belongs to the scores.",
            scaled_weights,
        ),
        Hint(
            "softmax_queries",
            "The softmax runs over the queries. The weights of one query must add up to 1 over"
            " its keys.",
            weighted(lambda scores: scores.softmax(1)),
        ),
        Hint(
            "softmax_heads",
            "The softmax runs over the heads. The weights of one query must add up to 1 over"
            " its keys.",
            weighted(lambda scores: scores.softmax(0)),
        ),
        Hint(
            "no_softmax",
            "The values are averaged by the scores themselves. Softmax turns scores into"
            " weights that add up to 1.",
            weighted(lambda scores: scores),
        ),
    ),
    idea="Take one query head. Which KV head does it use? Compute its scores, its weights and"
    " the average of the values by hand.",
)
