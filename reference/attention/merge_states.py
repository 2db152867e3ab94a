"""Merging of partial attention results by their log-sum-exp.

Attention over some of the keys leaves two things: an average of their values, and the log-sum-exp
of their scores, which says how much weight went into it. Two such states over different keys join
into the state over all of them: each average counts by its share of the weight. So keys can be cut
into parts (a shared prefix, chunks, ranks), each computed alone, in any order.
"""

import math

import torch

from ...bookkeeping.attention.merge_states import log2_lse_to_ln as log2_lse_to_ln
from ...contract.shapes import (
    LogSumExp,
    Output,
    PartLogSumExps,
    PartOutputs,
    RankLogSumExp,
)
from ...validation.merge import check_combine, check_merge


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
        prefix_lse: [query_heads, tokens] log-sum-exp of its scores; -inf (or inf, as some
            kernels write) where it is empty: its output is not read then.
        suffix_output, suffix_lse: the same over the second set.
        prefill_tokens_with_context: tokens that have a prefix; those behind them take the suffix
            as it is. None: all.
        output: the shape of the outputs, changed; None: a new tensor.
        output_lse: [query_heads, tokens], changed: the joint log-sum-exp, in the same base; None:
            not wanted.
        prefix_lse_base, suffix_lse_base: math.e or 2: of which logarithm each is.

    Returns:
        `output`; where both sets are empty 0, with log-sum-exp -inf.

    Raises:
        ValueError: shapes or devices that do not fit, or logarithms to different bases.
        TypeError: outputs of different dtypes, or a log-sum-exp that is not float32 or float64.

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
    check_merge(
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        prefill_tokens_with_context,
        output,
        output_lse,
        prefix_lse_base,
        suffix_lse_base,
    )
    output = torch.empty_like(prefix_output) if output is None else output
    tokens = prefix_output.shape[0]
    with_prefix = tokens
    if prefill_tokens_with_context is not None:
        with_prefix = prefill_tokens_with_context
    # step: count what is not finite as empty
    lses = torch.stack([prefix_lse, suffix_lse])
    base = math.log(prefix_lse_base)
    lses = torch.where(lses.isinf(), -torch.inf, lses * base)
    lses[0, :, with_prefix:] = -torch.inf
    # step: weigh each part by its share
    joint = lses.logsumexp(0)  # [query_heads, tokens]
    weights = torch.exp(lses - torch.where(joint.isinf(), 0.0, joint))
    # step: add up what has weight
    total = torch.zeros_like(prefix_output, dtype=lses.dtype)
    for part, weight in zip((prefix_output, suffix_output), weights, strict=True):
        weight = weight.T[:, :, None]  # [tokens, query_heads, 1]
        total += torch.where(weight > 0, weight * part.to(lses.dtype), 0.0)
    output.copy_(total)
    if output_lse is not None:
        output_lse.copy_(joint / base)
    return output


def lse_weighted_combine(
    outputs: PartOutputs,
    lses: PartLogSumExps,
    is_lse_base_on_e: bool = True,
) -> tuple[Output, RankLogSumExp]:
    """Return attention over any number of sets of keys, joined from the results over each.

    Args:
        outputs: [parts, tokens, query_heads, head_size].
        lses: [parts, tokens, query_heads] log-sum-exps; what is not finite counts as -inf, an
            empty part, whose output is not read.
        is_lse_base_on_e: natural logarithms; False: logarithms to base 2.

    Returns:
        The joint output [tokens, query_heads, head_size] and log-sum-exp [tokens, query_heads],
        in the base of `lses`; 0 and -inf where every part is empty.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: log-sum-exps that are not float32 or float64.

    Source:
        vLLM's `_lse_weighted_combine`, with which the ranks of decode context parallelism join.

    Example:
        >>> output, lse = lse_weighted_combine(
        ...     outputs=torch.tensor([8.0, 4.0]).view(2, 1, 1, 1),
        ...     lses=torch.tensor([0.0, 1.0]).view(2, 1, 1),
        ...     is_lse_base_on_e=False,
        ... )
        >>> output.flatten()
        tensor([5.3333])
    """
    check_combine(outputs, lses)
    base = 1.0 if is_lse_base_on_e else math.log(2)
    # step: count what is not finite as empty
    natural = torch.where(lses.isfinite(), lses * base, -torch.inf)
    # step: weigh each part by its share
    joint = natural.logsumexp(0)  # [tokens, query_heads]
    weights = torch.exp(natural - torch.where(joint.isinf(), 0.0, joint))
    # step: add up what has weight
    total = torch.zeros_like(outputs[0], dtype=lses.dtype)
    for part, weight in zip(outputs, weights[:, :, :, None], strict=True):
        total += torch.where(weight > 0, weight * part.to(lses.dtype), 0.0)
    return total.to(outputs.dtype), joint / base
