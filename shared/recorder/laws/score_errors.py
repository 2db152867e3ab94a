"""Errors of scores: how far the rounded scores of a float32 row may move its result."""

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.budgets import SCORE_EPS, capped_sizes, moved_by_scores


def move_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Return how far rounded scores may move one row, and the range of its values.

    Args:
        query: [query_heads, head_size], at the position of the last key.
        key: [keys, kv_heads, head_size] float64.
        value: [keys, kv_heads, value_head_size] float64.
        scale: Factor of the dot products.
        options: Those of a row that is recomputed. Scales are not used.

    Returns:
        [query_heads, value_head_size], and [2, query_heads, value_head_size].
    """
    kv_heads, device = key.shape[1], key.device
    # step: drop the keys before the window or the chunk
    first = 0
    if options.sliding_window is not None:
        first = max(first, len(key) - options.sliding_window)
    if options.attention_chunk_size is not None:
        chunk = options.attention_chunk_size
        first = max(first, (len(key) - 1) // chunk * chunk)
    key, value = (states[first:].transpose(0, 1) for states in (key, value))
    # step: compute the scores, and the sums of their absolute products
    q = query.double().reshape(
        kv_heads, -1, query.shape[-1]
    )  # [kv_heads, group, head_size]
    scores = (q @ key.mT * scale).flatten(0, 1)  # [query_heads, keys]
    sizes = (q.abs() @ key.mT.abs() * abs(scale)).flatten(0, 1)
    if options.logits_soft_cap is not None:
        cap = options.logits_soft_cap
        sizes = capped_sizes(scores, sizes, cap)
        scores = cap * (scores / cap).tanh()
    distance = torch.arange(1 - scores.shape[1], 1, device=device)
    if options.alibi_slopes is not None:
        bias = options.alibi_slopes.double()[:, None] * distance
        scores, sizes = scores + bias, sizes + bias.abs()
    if options.position_bias is not None:
        reach = options.position_bias.shape[1] // 2
        bias = options.position_bias.double()[:, distance.clamp(min=-reach) + reach]
        scores, sizes = scores + bias, sizes + bias.abs()
    values = value.repeat_interleave(len(query) // kv_heads, 0)
    if options.sinks is not None:
        # a sink is one more key, with the value 0
        sinks = options.sinks.double()[:, None]
        scores, sizes = (
            torch.cat(pair, 1) for pair in ((scores, sinks), (sizes, sinks.abs()))
        )
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    # step: move the result by them
    weights = scores.softmax(1)[:, None]
    moved = moved_by_scores(
        weights, SCORE_EPS * sizes[:, None], values.abs(), weights @ values.abs()
    )
    return moved[:, 0], torch.stack([values.amin(1), values.amax(1)])
