"""What does one request's attention come to, once its keys are gathered?

Scores become weights, weights average the values. Every option of attention has its one line
here: those that change a score stand in `score_keys`, those that hide a key in `see_keys`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ..cache._fp8 import per_head, quantise


@dataclass(frozen=True)
class Positions:
    """Where the queries and keys of one request stand in its sequence.

    Args:
        query: [queries], negative where there are more queries than keys.
        key: [keys].
        tree: [queries, queries] bool, which new token sees which; None: no tree.
    """

    query: Tensor
    key: Tensor
    tree: Tensor | None


def attend_to_keys(
    question: Tensor,
    key: Tensor,
    value: Tensor,
    req: int,
    rows: slice,
    scale: float,
    options: AttentionOptions,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one request's queries.

    Args:
        question: [queries, query_heads, head_size].
        key: [keys, kv_heads, head_size], the whole sequence.
        value: [keys, kv_heads, value_head_size].
        req: the request, for options that have an entry each.
        rows: the request's tokens, for options that have an entry a token.
        scale: what scores are multiplied with.
        options: what else was asked for.
        compute_dtype: the dtype of all arithmetic.

    Returns:
        [queries, query_heads, value_head_size] and [query_heads, queries], in `compute_dtype`.
    """
    group_size = question.shape[1] // key.shape[1]
    question, key, value = (x.to(compute_dtype) for x in (question, key, value))
    if options.k_scale is not None and options.v_scale is not None:
        key = (key * per_head(options.k_scale)).to(compute_dtype)
        value = (value * per_head(options.v_scale)).to(compute_dtype)
    # every query head gets a copy of the kv head it reads: [keys, query_heads, head_size]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)
    place = find_positions(req, len(question), len(key), options, question.device)
    seen = see_keys(req, rows, place, options)
    if not options.batch_invariant or not len(question):
        return weigh_keys(question, key, value, place, seen, scale, options)
    # each query by itself, over no keys but those it sees: then nothing around it, not even the
    # shape of a product, has a part in its result
    alone = [
        weigh_keys(
            question[row : row + 1],
            key[own],
            value[own],
            Positions(place.query[row : row + 1], place.key[own], None),
            own[None, own],
            scale,
            options,
        )
        for row, own in enumerate(seen)
    ]
    outputs, lses = zip(*alone, strict=True)
    return torch.cat(outputs), torch.cat(lses, dim=1)


def weigh_keys(
    question: Tensor,
    key: Tensor,
    value: Tensor,
    place: Positions,
    seen: Tensor,
    scale: float,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Return [queries, query_heads, value_head_size] and [query_heads, queries] of some queries.

    Args:
        question: [queries, query_heads, head_size].
        key, value: [keys, query_heads, their size].
        place: where they stand.
        seen: [queries, keys] which query sees which key.
        scale, options: as in `attend_to_keys`.
    """
    # step: compare each query with every key
    scores = score_keys(question, key, place, scale, options)
    # step: hide the keys that a query does not see
    scores = scores.masked_fill(~seen, -torch.inf)
    # what nobody sees may hold anything, and 0 * NaN is no 0
    value = value.masked_fill(~seen.any(0)[:, None, None], 0.0)
    # step: turn scores into weights
    lse = scores.logsumexp(dim=2)  # [query_heads, queries]
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks[:, None].to(lse.dtype))
    # a query that sees nothing has the log-sum-exp -inf, and -inf - -inf is no number
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[:, :, None])
    # step: average the values by them
    return torch.einsum("hqk,khd->qhd", weights, value), lse


def store_rows(result: Tensor, out: Tensor, options: AttentionOptions) -> None:
    """Write finished rows in the dtype of the output, an FP8 one with its scale."""
    if options.out_scale is None:
        out.copy_(result)
    else:
        out.copy_(quantise(result, options.out_scale, out.dtype))


def score_keys(
    question: Tensor,
    key: Tensor,
    place: Positions,
    scale: float,
    options: AttentionOptions,
) -> Tensor:
    """Return [query_heads, queries, keys] how well each key answers each query."""
    scores = torch.einsum("qhd,khd->hqk", question, key) * scale
    cap = options.logits_soft_cap
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    distance = place.key[None, :] - place.query[:, None]
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(scores.dtype)
        scores = scores + slopes[:, None, None] * distance
    if options.position_bias is not None:
        # distances past the table's reach share its outermost entries
        reach = options.position_bias.shape[1] // 2
        bias = options.position_bias[:, distance.clamp(-reach, reach) + reach]
        scores = scores + bias.to(scores.dtype)
    return scores


def see_keys(
    req: int, rows: slice, place: Positions, options: AttentionOptions
) -> Tensor:
    """Return [queries, keys] which query sees which key."""
    query, key = place.query[:, None], place.key[None, :]
    seen = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool, device=key.device)
    if place.tree is not None:
        # the keys before the tree, and in the tree those that the mask names
        seen[:, key.shape[1] - query.shape[0] :] = place.tree
    elif is_causal(req, options):
        seen &= key <= query
    if options.sliding_window is not None:
        seen &= (key - query).abs() < options.sliding_window
    if options.attention_chunk_size is not None:
        size = options.attention_chunk_size
        seen &= key // size == query // size
    if options.query_ranges is not None:
        first, last = options.query_ranges[rows].T[:, :, None]
        seen |= (first >= 0) & (first <= key) & (key <= last)
    return seen


def is_causal(req: int, options: AttentionOptions) -> bool:
    """Tell whether a request's queries see no further than themselves."""
    if isinstance(options.causal, Tensor):
        return bool(options.causal[req])
    return options.causal


def find_positions(
    req: int,
    query_len: int,
    key_len: int,
    options: AttentionOptions,
    device: torch.device,
) -> Positions:
    """Return where one request's queries and keys stand: the queries come last."""
    context_len = key_len - query_len
    key = torch.arange(key_len, device=device)
    query = torch.arange(context_len, key_len, device=device)
    if options.tree_mask is None or query_len > options.tree_mask.shape[1]:
        return Positions(query, key, None)
    # siblings stand at the same position: as deep as they have ancestors
    tree = options.tree_mask[req, :query_len, :query_len]
    query = context_len + tree.sum(1) - 1
    return Positions(query, torch.cat([key[:context_len], query]), tree)
