"""Merging of partial attention results by their log-sum-exp.

Attention over some of the keys gives two results: an average of their values, and the log-sum-exp
of their scores, which is the logarithm of the total weight. Partial results over disjoint sets of
keys combine into the result over all of them: each average is weighted by its share of the total
weight. So the keys can be split (a shared prefix, chunks, ranks) and computed in any order.

As in a softmax, the largest log-sum-exp is subtracted, and weights are divided by their own sum.
So shares sum to 1, and a merged element is between those that it is merged from, however large the
log-sum-exps are.
"""

import math

import torch

from ...contract.argument_types import typed
from ...contract.shapes import (
    AnyLogSumExp,
    LogSumExp,
    Output,
    PartLogSumExps,
    PartOutputs,
    RankLogSumExp,
)
from ...validation import validated
from ...validation.merge import check_combine, check_lse, check_merge
from .softmax import share_weight


@validated(check_merge)
def merge_attn_states(
    prefix_output: Output,
    prefix_lse: LogSumExp,
    suffix_output: Output,
    suffix_lse: LogSumExp,
    prefill_tokens_with_context: int | None = None,
    output: Output | None = None,
    output_lse: LogSumExp | None = None,
    prefix_lse_base: float = math.e,
    suffix_lse_base: float = math.e,
) -> Output:
    """Return attention over two sets of keys, joined from the results over each.

    Args:
        prefix_output: [tokens, query_heads, head_size] over the first set.
        prefix_lse: [query_heads, tokens] log-sum-exp of its scores. -inf (or inf, as some kernels
            write) means that the set is empty; then its output is not read. NaN is an error of the
            kernel that wrote it, and makes the row NaN.
        suffix_output, suffix_lse: The same over the second set.
        prefill_tokens_with_context: Tokens that have a prefix; those after them get the suffix
            unchanged. If None, all have one.
        output: Optional. Modified in place. If None, a new tensor like `prefix_output` is made. It
            may be `prefix_output` or `suffix_output`.
        output_lse: Optional. [query_heads, tokens], modified in place: the log-sum-exp over both
            sets, in the same base.
        prefix_lse_base, suffix_lse_base: math.e or 2, the base of each logarithm.

    Returns:
        `output`. Where both sets are empty it is 0, with log-sum-exp -inf.

    Raises:
        ValueError: Shapes or devices do not match, or the bases differ.
        TypeError: Outputs have different dtypes, or a log-sum-exp is not float32 or float64.

    Source:
        vLLM's function of that name; section 2.2 of Juravsky et al., "Hydragen", 2024.

    Example:
        The prefix weighs e^0 = 1, the suffix e^1.0986 = 3: a quarter of 8 and three quarters of 4.

        >>> merge_attn_states(
        ...     prefix_output=torch.full((1, 1, 1), 8.0),
        ...     prefix_lse=torch.zeros(1, 1),
        ...     suffix_output=torch.full((1, 1, 1), 4.0),
        ...     suffix_lse=torch.full((1, 1), 3.0).log(),
        ... ).flatten()
        tensor([5.])
    """
    output = torch.empty_like(prefix_output) if output is None else output
    tokens = prefix_output.shape[0]
    with_prefix = tokens
    if prefill_tokens_with_context is not None:
        with_prefix = prefill_tokens_with_context
    # step: treat infinite log-sum-exps as empty
    lses = torch.stack([prefix_lse, suffix_lse])
    lses = torch.where(lses.isinf(), -torch.inf, lses)
    lses[0, :, with_prefix:] = -torch.inf
    # step: compute the weight of each partial result
    weights, joint = share_weight(lses, math.log(prefix_lse_base))
    # step: add the partial results that have weight
    total = torch.zeros_like(prefix_output, dtype=lses.dtype)
    for part_lse, part, weight in zip(
        lses, (prefix_output, suffix_output), weights, strict=True
    ):
        weight = weight.T[:, :, None]  # [tokens, query_heads, 1]
        is_empty = part_lse.T[:, :, None].isinf()
        total += torch.where(is_empty, 0.0, weight * part.to(lses.dtype))
    output.copy_(total)
    if output_lse is not None:
        output_lse.copy_(joint)
    return output


@validated(check_combine)
def lse_weighted_combine(
    outputs: PartOutputs,
    lses: PartLogSumExps,
    is_lse_base_on_e: bool = True,
) -> tuple[Output, RankLogSumExp]:
    """Return attention over any number of sets of keys, joined from the results over each.

    Args:
        outputs: [parts, tokens, query_heads, head_size], the partial results.
        lses: [parts, tokens, query_heads] log-sum-exps. One that is not finite, NaN too, counts
            as -inf: the set is empty, and its output is not read.
        is_lse_base_on_e: Whether the logarithms are natural. If False, they are to base 2.

    Returns:
        The output [tokens, query_heads, head_size] and log-sum-exp [tokens, query_heads] over all
        sets, in the base of `lses`; 0 and -inf where every set is empty.

    Raises:
        ValueError: Shapes or devices do not match.
        TypeError: The log-sum-exps are not float32 or float64.

    Source:
        vLLM's `_lse_weighted_combine`, which combines the ranks of decode context parallelism.

    Example:
        >>> output, lse = lse_weighted_combine(
        ...     outputs=torch.tensor([8.0, 4.0]).view(2, 1, 1, 1),
        ...     lses=torch.tensor([0.0, 1.0]).view(2, 1, 1),
        ...     is_lse_base_on_e=False,
        ... )
        >>> output.flatten()
        tensor([5.3333])
    """
    # step: treat log-sum-exps that are not finite as empty
    lses = torch.where(lses.isfinite(), lses, -torch.inf).contiguous()
    # step: compute the weight of each partial result
    weights, joint = share_weight(lses, 1.0 if is_lse_base_on_e else math.log(2))
    # step: add the partial results that have weight
    total = torch.zeros_like(outputs[0], dtype=lses.dtype)
    for part_lse, part, weight in zip(lses, outputs, weights, strict=True):
        is_empty = part_lse[:, :, None].isinf()
        total += torch.where(is_empty, 0.0, weight[:, :, None] * part.to(lses.dtype))
    return total.to(outputs.dtype), joint


@typed
def log2_lse_to_ln(lse: AnyLogSumExp) -> AnyLogSumExp:
    """Return log-sum-exps converted from base 2 to base e.

    Args:
        lse: float32 or float64 of any shape: base-2 logarithms, as computed by kernels that use
            exp2.

    Returns:
        A new tensor of the same shape and dtype. Infinite values do not change.

    Raises:
        TypeError: the dtype is not supported.

    Source:
        vLLM's function of that name.

    Example:
        >>> log2_lse_to_ln(torch.tensor([0.0, 1.0, float("-inf")]))
        tensor([0.0000, 0.6931,   -inf])
    """
    check_lse(lse)
    return lse * math.log(2)
