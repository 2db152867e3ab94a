"""Merge of attention over two sets of keys by their log-sum-exps, in plain torch."""

import math

import torch


@torch.no_grad()
def merge(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over both sets and its log-sum-exp, computed in float64.

    Args:
        v_a, v_b: [seq_len, num_heads, head_dim] attention over each set.
        s_a, s_b: [seq_len, num_heads] log-sum-exps in base 2. -inf for an empty set, whose
            attention is not read.

    Returns:
        [seq_len, num_heads, head_dim] in the dtype of `v_a`, and [seq_len, num_heads] float32. If
        both sets are empty, 0 and -inf.
    """
    sums = torch.stack([s_a, s_b]).double() * math.log(2)
    joint = torch.logsumexp(sums, 0)  # [seq_len, num_heads]
    # an empty set has the weight 0, also if both are empty
    weights = torch.softmax(sums, 0).masked_fill(sums == -math.inf, 0.0)
    values = torch.stack([v_a, v_b]).double()
    values = values.masked_fill((weights == 0)[..., None], 0.0)
    output = (weights[..., None] * values).sum(0)
    return output.to(v_a.dtype), (joint / math.log(2)).float()
