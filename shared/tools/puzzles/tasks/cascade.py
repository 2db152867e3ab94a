"""Puzzle 10: cascade attention over a shared prefix."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..puzzle import Case, Function, Hint, Puzzle, counted, small_numbers
from .attention import attend, attend_each, with_nan

INF = float("inf")
TEMPLATE = '''\
"""Puzzle 10: cascade attention.

Many requests begin with the same prompt. Cascade attention reads this shared prefix once for
all of them, reads the rest of each request (its suffix), and merges the two results.
"""

import torch
from torch import Tensor


def cascade(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    suffix_key: Tensor,
    suffix_value: Tensor,
    suffix_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention of one query per request to the shared prefix and to its own suffix.

    The tensors may have any strides: they need not be contiguous.

    Args:
        query: [reqs, heads, head_size].
        prefix_key, prefix_value: [prefix_len, heads, head_size], at least one key.
        suffix_key, suffix_value: [reqs, max_suffix, heads, head_size]. Entries past the end
            of a suffix are padding and can be NaN.
        suffix_lens: [reqs] number of keys in each suffix. It can be 0.
        scale: factor of the scores.

    Returns:
        output [reqs, heads, head_size] and lse [reqs, heads], the natural logarithm of the
        sum of exp(score) over the keys of prefix and suffix.

    Example:
        1 head of 1 element, query 1, scale 1. The prefix has one key 0 with the value 8:
        output 8, total weight exp(0) = 1. The suffix has one key 1.0986 with the value 4:
        output 4, total weight exp(1.0986) = 3. Merged: 1/4 * 8 + 3/4 * 4 = 5, and
        lse = ln 4 = 1.3863.

        >>> one = torch.ones(1, 1, 1)
        >>> output, lse = cascade(
        ...     query=one,
        ...     prefix_key=0 * one,
        ...     prefix_value=8 * one,
        ...     suffix_key=torch.tensor([3.0]).log().view(1, 1, 1, 1),
        ...     suffix_value=torch.tensor([4.0]).view(1, 1, 1, 1),
        ...     suffix_lens=torch.tensor([1]),
        ...     scale=1.0,
        ... )
        >>> output, lse
        (tensor([[[5.]]]), tensor([[1.3863]]))
    """
    raise NotImplementedError
'''


def cases() -> Iterator[Case]:
    """Yield prefixes of 1 to 3 keys and suffixes of 0 to 2, of one request and of more."""
    number = 0
    for lens in ((1,), (2,), (0,), (1, 2), (2, 0), (1, 2, 0)):
        for prefix_len in (1, 2, 3):
            for heads, size in ((1, 1), (2, 1), (3, 2)):
                number += 1
                reqs = len(lens)
                longest = max(2, *lens)
                key = small_numbers(reqs, longest, heads, size, seed=number)
                value = counted(reqs, longest, heads, size) ** 2
                rows = torch.tensor(lens)
                padding = torch.arange(longest)[None] >= rows[:, None]
                yield {
                    "query": small_numbers(reqs, heads, size, seed=500 + number, low=1),
                    "prefix_key": small_numbers(
                        prefix_len, heads, size, seed=900 + number
                    ),
                    "prefix_value": counted(prefix_len, heads, size, start=-7),
                    "suffix_key": with_nan(key, padding),
                    "suffix_value": with_nan(value, padding),
                    "suffix_lens": rows,
                    "scale": 0.5,
                }


def suffixes(case: Case, lens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first keys and values of each suffix."""
    return (
        [key[:length] for key, length in zip(case["suffix_key"], lens, strict=True)],
        [
            value[:length]
            for value, length in zip(case["suffix_value"], lens, strict=True)
        ],
    )


def parts(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output and log-sum-exp over the prefix, and over the suffixes."""
    queries = list(case["query"][:, None])
    keys, values = suffixes(case, case["suffix_lens"].tolist())
    prefix = attend(
        case["query"], case["prefix_key"], case["prefix_value"], case["scale"]
    )
    return *prefix, *attend_each(queries, keys, values, case["scale"])


def right(**case: Any) -> tuple[Tensor, Tensor]:
    """Return the oracle's attention over prefix and suffix together."""
    return together(case, case["suffix_lens"].tolist())


def together(case: Case, lens: list[int]) -> tuple[Tensor, Tensor]:
    """Return attention over the prefix and suffixes of some lengths."""
    keys, values = suffixes(case, lens)
    return attend_each(
        list(case["query"][:, None]),
        [torch.cat([case["prefix_key"], key]) for key in keys],
        [torch.cat([case["prefix_value"], value]) for value in values],
        case["scale"],
    )


def mean(**case: Any) -> tuple[Tensor, Tensor]:
    """Weigh prefix and suffix equally."""
    prefix, _, suffix, _ = parts(case)
    return (prefix + suffix) / 2, right(**case)[1]


def by_length(**case: Any) -> tuple[Tensor, Tensor]:
    """Weigh prefix and suffix by their number of keys."""
    prefix, _, suffix, _ = parts(case)
    lens = case["suffix_lens"][:, None, None]
    count = len(case["prefix_key"])
    return (count * prefix + lens * suffix) / (count + lens), right(**case)[1]


def padding(**case: Any) -> tuple[Tensor, Tensor]:
    """Attend to the padding."""
    reqs, longest = case["suffix_key"].shape[:2]
    return together(case, [longest] * reqs)


def nan_values(**case: Any) -> tuple[Tensor, Tensor]:
    """Multiply the values in the padding by 0."""
    out, lse = right(**case)
    return with_nan(out, case["suffix_lens"] < case["suffix_key"].shape[1]), lse


def empty_suffix(**case: Any) -> tuple[Tensor, Tensor]:
    """Return NaN where the suffix is empty."""
    out, lse = right(**case)
    return with_nan(out, case["suffix_lens"] == 0), lse


def empty_suffix_both(**case: Any) -> tuple[Tensor, Tensor]:
    """Return NaN in both results where the suffix is empty."""
    out, lse = right(**case)
    is_empty = case["suffix_lens"] == 0
    return with_nan(out, is_empty), with_nan(lse, is_empty)


def empty_suffix_zero(**case: Any) -> tuple[Tensor, Tensor]:
    """Count an empty suffix as one with log-sum-exp 0."""
    prefix, prefix_lse, suffix, suffix_lse = parts(case)
    suffix_lse = suffix_lse.masked_fill(suffix_lse == -INF, 0.0)
    lses = torch.stack([prefix_lse, suffix_lse])
    return weighted(prefix, suffix, lses.softmax(0)), lses.logsumexp(0)


def weighted(prefix: Tensor, suffix: Tensor, shares: Tensor) -> Tensor:
    """Return both results, each multiplied by its share."""
    return shares[0][..., None] * prefix + shares[1][..., None] * suffix


def added(**case: Any) -> tuple[Tensor, Tensor]:
    """Add the two outputs."""
    prefix, _, suffix, _ = parts(case)
    return prefix + suffix, right(**case)[1]


def lse_sum(**case: Any) -> tuple[Tensor, Tensor]:
    """Add the two log-sum-exps."""
    _, prefix_lse, _, suffix_lse = parts(case)
    return right(**case)[0], prefix_lse + suffix_lse


def suffix_only(**case: Any) -> tuple[Tensor, Tensor]:
    """Leave out the prefix."""
    _, _, suffix, lse = parts(case)
    return suffix, lse


def prefix_only(**case: Any) -> tuple[Tensor, Tensor]:
    """Leave out the suffixes."""
    prefix, lse, _, _ = parts(case)
    return prefix, lse


def base_2(**case: Any) -> tuple[Tensor, Tensor]:
    """Take the log-sum-exps of the parts as logarithms to base 2."""
    prefix, prefix_lse, suffix, suffix_lse = parts(case)
    lses = math.log(2) * torch.stack([prefix_lse, suffix_lse])
    out = weighted(prefix, suffix, lses.softmax(0))
    return out, lses.logsumexp(0) / math.log(2)


def exchanged(**case: Any) -> tuple[Tensor, Tensor]:
    """Give the weight of the prefix to the suffix."""
    prefix, prefix_lse, suffix, suffix_lse = parts(case)
    lses = torch.stack([prefix_lse, suffix_lse])
    return weighted(suffix, prefix, lses.softmax(0)), lses.logsumexp(0)


def scaled(change: Any) -> Function:
    """Return a wrong answer with another scale."""

    def wrong(**case: Any) -> tuple[Tensor, Tensor]:
        return right(**(case | {"scale": change(case["scale"])}))

    return wrong


EMPTY = (
    "This suffix is empty. Its largest score is -inf, and -inf - (-inf) is NaN. So is 0 / 0. Its"
    " weight in the merge is 0."
)
PUZZLE = Puzzle(
    number=10,
    name="cascade",
    title="cascade attention over a shared prefix",
    page="concepts/cascade_attention",
    template=TEMPLATE,
    results={"output": ("request", "head", "element"), "lse": ("request", "head")},
    cases=cases,
    right=right,
    hints=(
        Hint(
            "mean",
            "Prefix and suffix have the same weight. Their weights are exp of their"
            " log-sum-exps, as in puzzle 8.",
            mean,
        ),
        Hint(
            "key_counts",
            "The results are weighted by numbers of keys. What counts is the total weight of"
            " the keys, exp(lse).",
            by_length,
        ),
        Hint(
            "padding_read",
            "Keys past the end of a suffix have weight. Mask them by suffix_lens.",
            padding,
        ),
        Hint(
            "nan_times_zero",
            "The padding has weight 0, but its values can be NaN, and 0 * NaN is NaN. Replace"
            " the values of masked keys, or leave them out.",
            nan_values,
        ),
        Hint("empty_suffix", EMPTY, empty_suffix),
        Hint("empty_suffix", EMPTY, empty_suffix_both),
        Hint(
            "empty_weight",
            "An empty suffix has weight. The sum of exp(score) over no keys is 0, and its"
            " logarithm is -inf, not 0.",
            empty_suffix_zero,
        ),
        Hint(
            "added",
            "The two outputs were added. Each is an average already, so weigh them by their"
            " shares, which add up to 1.",
            added,
        ),
        Hint(
            "lse_sum",
            "The output is right. Weights add up, and their logarithms do not.",
            lse_sum,
        ),
        Hint(
            "no_prefix",
            "The result is that of the suffix alone.",
            suffix_only,
        ),
        Hint(
            "no_suffix",
            "The result is that of the prefix alone.",
            prefix_only,
        ),
        Hint(
            "lse_base",
            "The parts were merged with powers of 2. Their log-sum-exps are natural.",
            base_2,
        ),
        Hint(
            "exchanged",
            "The prefix has the weight of the suffix and the suffix has that of the prefix.",
            exchanged,
        ),
        Hint(
            "scale_divided",
            "The scores were divided by the scale. It is a factor: multiply by it.",
            scaled(lambda scale: 1 / scale),
        ),
        Hint(
            "scale_missing",
            "The result is that of scale 1. Multiply the scores by the scale, in the prefix and"
            " in the suffix.",
            scaled(lambda scale: 1.0),
        ),
    ),
    idea="Compute output and lse over the prefix, for all requests. Compute both over each"
    " suffix. Then merge them as in puzzle 8, with two splits.",
)
