"""Puzzle 8: partial results of split-KV attention, combined by log-sum-exp."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ....contract.operations import load_implementation
from ..puzzle import Case, Function, Hint, Puzzle, counted
from .attention import with_nan

INF = float("inf")
TEMPLATE = '''\
"""Puzzle 8: combine the results of split-KV attention.

A long sequence is split: each part of the keys is computed by another program. Each program
returns its output and its log-sum-exp (lse), the logarithm of the sum of exp(score) over its
keys. exp(lse) is the total weight of its keys.
"""

import torch
from torch import Tensor


def combine_splits(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over all keys, from the results over each split.

    The tensors may have any strides: they need not be contiguous.

    Args:
        outputs: [splits, tokens, heads, head_size] float32.
        lses: [splits, tokens, heads] natural logarithms. -inf means that the split has no
            key for this row; its output is then not defined and can be NaN. An lse can be
            large: exp(lse) can overflow.

    Returns:
        output [tokens, heads, head_size] and lse [tokens, heads] over all keys. If every
        split is empty, output 0 and lse -inf.

    Example:
        Split 0 has the output 8 and the total weight exp(0) = 1. Split 1 has the output 4
        and the total weight exp(1.0986) = 3. The output is 1/4 * 8 + 3/4 * 4 = 5, and
        lse = ln(1 + 3) = 1.3863.

        >>> outputs = torch.tensor([8.0, 4.0]).view(2, 1, 1, 1)
        >>> lses = torch.tensor([1.0, 3.0]).log().view(2, 1, 1)
        >>> combine_splits(outputs, lses)
        (tensor([[[5.]]]), tensor([[1.3863]]))
    """
    raise NotImplementedError
'''


def cases() -> Iterator[Case]:
    """Yield 1 to 3 splits of one row with all log-sum-exps, then more rows."""
    for splits in (1, 2, 3):
        numbers = [0.0, 1.0, 2.0, -INF] if splits < 3 else [0.0, 1.0, -INF]
        # empty splits come last
        for lses in sorted(
            product(numbers, repeat=splits), key=lambda row: row.count(-INF)
        ):
            yield case_of(torch.tensor(lses).view(splits, 1, 1), 1)
    grid = torch.tensor([0.0, 1.0, 2.0, -1.0, 3.0, 1.0, 0.0, 2.0, 1.0, 2.0, 0.0, 3.0])
    yield case_of(grid.view(2, 2, 3), 2)
    yield case_of(grid.view(3, 2, 2), 2)
    for lses in ((200.0, 201.0), (-200.0, -201.0)):
        yield case_of(torch.tensor(lses).view(2, 1, 1), 1)


def case_of(lses: Tensor, size: int) -> Case:
    """Return a case whose outputs are 1, 2, 3, ..., and NaN in empty splits."""
    outputs = counted(*lses.shape, size) ** 2
    return {"outputs": with_nan(outputs, lses == -INF), "lses": lses}


def right(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reference's combination, in float64."""
    output, lse = load_implementation("reference").lse_weighted_combine(
        outputs.double(), lses.double()
    )
    return output.float(), lse.float()


def known(outputs: Tensor, lses: Tensor) -> Tensor:
    """Return the outputs with 0 in empty splits."""
    return outputs.masked_fill((lses == -INF)[..., None], 0.0)


def mean(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh all splits equally."""
    return outputs.mean(0), right(outputs, lses)[1]


def by_lse(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Use the logarithms themselves as weights."""
    shares = (lses / lses.sum(0))[..., None]
    return (shares * outputs).sum(0), right(outputs, lses)[1]


def not_divided(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Add up outputs times weight."""
    total = (lses.exp()[..., None] * known(outputs, lses)).sum(0)
    return total, right(outputs, lses)[1]


def not_divided_over_max(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Add up outputs times weight, relative to the largest one."""
    weights = torch.exp(lses - lses.amax(0)).nan_to_num(0.0)
    return (weights[..., None] * known(outputs, lses)).sum(0), right(outputs, lses)[1]


def base_2(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Take the logarithms to base 2."""
    output, lse = right(outputs, lses * math.log(2))
    return output, (lse.double() / math.log(2)).float()


def base_2_weights(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Take powers of 2 as weights."""
    return base_2(outputs, lses)[0], right(outputs, lses)[1]


def nan_times_zero(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return NaN where a split is empty."""
    output, lse = right(outputs, lses)
    return with_nan(output, (lses == -INF).any(0)), lse


def all_empty(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return NaN where all splits are empty."""
    output, lse = right(outputs, lses)
    return with_nan(output, lse == -INF), lse


def all_empty_both(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return NaN in both results where all splits are empty."""
    output, lse = right(outputs, lses)
    return with_nan(output, lse == -INF), with_nan(lse, lse == -INF)


def all_empty_lse(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return NaN as log-sum-exp where all splits are empty."""
    output, lse = right(outputs, lses)
    return output, with_nan(lse, lse == -INF)


def sum_of_lses(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the logarithms."""
    return right(outputs, lses)[0], lses.sum(0)


def largest_lse(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logarithm."""
    return right(outputs, lses)[0], lses.amax(0)


def relative_lse(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the sum relative to the largest one."""
    output, lse = right(outputs, lses)
    return output, torch.where(lse == -INF, lse, lse - lses.amax(0))


def overflow(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Compute exp(lse) itself in float32."""
    total = lses.exp().sum(0)
    output = (lses.exp()[..., None] * known(outputs, lses)).sum(0) / total[..., None]
    is_empty = (lses == -INF).all(0)
    return output.masked_fill(is_empty[..., None], 0.0), total.log()


def operations(function: Function) -> dict[str, Function]:
    """Return pagetwin's operation, with its other base and its other marks of empty splits."""

    def lse_weighted_combine(
        outputs: Tensor, lses: Tensor, is_lse_base_on_e: bool = True
    ) -> Any:
        unit = 1.0 if is_lse_base_on_e else math.log(2)
        natural = lses.masked_fill(~lses.isfinite(), -INF) * unit
        output, lse = function(outputs.float(), natural)
        return output.to(outputs.dtype), (lse / unit).to(lses.dtype)

    return {"lse_weighted_combine": lse_weighted_combine}


PUZZLE = Puzzle(
    number=8,
    name="combine_splits",
    title="the results of split-KV attention, combined",
    page="concepts/merge_states",
    template=TEMPLATE,
    results={"output": ("token", "head", "element"), "lse": ("token", "head")},
    cases=cases,
    right=right,
    hints=(
        Hint(
            "mean",
            "All splits have the same weight. A split whose keys have larger scores weighs"
            " more: its total weight is exp(lse).",
            mean,
        ),
        Hint(
            "logarithm",
            "The log-sum-exp itself was used as a weight. It is the logarithm of the weight.",
            by_lse,
        ),
        Hint(
            "divide",
            "The weighted outputs were added up and not divided. The shares of the splits add"
            " up to 1.",
            not_divided,
        ),
        Hint(
            "divide",
            "The weighted outputs were added up and not divided. The shares of the splits add"
            " up to 1.",
            not_divided_over_max,
        ),
        Hint(
            "lse_base",
            "The logarithms were taken as logarithms to base 2. They are natural: the weight is"
            " exp(lse), not 2 to the power of lse.",
            base_2,
        ),
        Hint(
            "lse_base",
            "The logarithms were taken as logarithms to base 2. They are natural: the weight is"
            " exp(lse), not 2 to the power of lse.",
            base_2_weights,
        ),
        Hint(
            "nan_times_zero",
            "An empty split has weight 0, but its output can be NaN, and 0 * NaN is NaN. Do not"
            " multiply it: select.",
            nan_times_zero,
        ),
        Hint(
            "empty_row",
            "All splits are empty here, so the largest lse is -inf, and -inf - (-inf) is NaN."
            " So is 0 / 0. Such a row has output 0 and lse -inf.",
            all_empty,
        ),
        Hint(
            "empty_row",
            "All splits are empty here, so the largest lse is -inf, and -inf - (-inf) is NaN."
            " So is 0 / 0. Such a row has output 0 and lse -inf.",
            all_empty_both,
        ),
        Hint(
            "empty_lse",
            "All splits are empty here. The output is right. The lse is -inf, and -inf - (-inf)"
            " is NaN.",
            all_empty_lse,
        ),
        Hint(
            "lse_sum",
            "The output is right. Weights add up, and their logarithms do not.",
            sum_of_lses,
        ),
        Hint(
            "lse_largest",
            "The output is right. The joint lse is larger than the largest lse, because it is"
            " the logarithm of a sum.",
            largest_lse,
        ),
        Hint(
            "lse_maximum",
            "The output is right. The sum is relative to the largest lse, so the largest lse"
            " is part of the result.",
            relative_lse,
        ),
        Hint(
            "overflow",
            "exp of a large lse is infinite in float32, and exp of a very small one is 0."
            " Subtract the largest lse first: the shares do not change.",
            overflow,
        ),
    ),
    idea="Compute the total weight exp(lse) of each split, and its share of the sum of all"
    " weights. The output is the average of the outputs by these shares.",
    operations=operations,
    laws=("any number of partial results combine by their weight",),
    law_hint="The small cases are right. Here log-sum-exps are far from 0 or far apart, and"
    " several rows have empty splits at the same time.",
)
