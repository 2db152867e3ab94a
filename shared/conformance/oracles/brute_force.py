"""Brute-force oracle: attention with all options in float64, one query and one key at a time.

Every option is implemented from its definition: one loop over requests, one over queries and one
over keys, with Python numbers for positions and float64 for scores. The oracle shares no code with
either twin. It reads no masked key, so masked slots may hold NaN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contract.budgets import (
    SCORE_EPS,
    Verdict,
    allowed_range,
    capped_sizes,
    judge_rows,
    lost_in_sums,
    moved_by_scores,
    row_budgets,
)
from ..base.judged_call import expect_no_call

Flip = Callable[[int, int, int], bool]
"""From (request, query, key): whether the mask of that key is inverted."""


@dataclass(frozen=True)
class OracleRequest:
    """Queries, keys and values of one request, on the host and as stored or as numbers.

    Args:
        query: [queries, query_heads, head_size].
        key: [keys, kv_heads, head_size].
        value: [keys, kv_heads, value_head_size].
        k_scale, v_scale: Optional. [keys, kv_heads] factors of keys and values. If None, those of
            the options are meant.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class Answer:
    """The exact result of attention, in float64 on the host.

    Args:
        out: [tokens, query_heads, value_head_size].
        lse: [query_heads, tokens] natural log-sum-exp.
        sizes: As `out`, but the weighted average of the absolute values.
        scores: [query_heads, tokens] the largest sum of absolute products of a score.
        lost: [tokens, query_heads] what float32 may lose in sums of weights.
        moved: As `out`: how far a rounding of the scores' products may move it.
        joined: The same for a row that is merged from partial results by log-sum-exp.
        value_range: [2, ...] as `out`: the smallest and the largest value that it averages.
    """

    out: Tensor
    lse: Tensor
    sizes: Tensor
    scores: Tensor
    lost: Tensor
    moved: Tensor
    joined: Tensor
    value_range: Tensor

    def terms(self, is_joined: bool = False) -> tuple[Tensor, ...]:
        """Return the arguments of `judge_rows` from `magnitude` on."""
        moved = self.joined if is_joined else self.moved
        return self.sizes, self.lost, moved, self.value_range


def attend_by_hand(
    requests: Sequence[OracleRequest],
    options: dict[str, Any],
    tokens: int,
    flip: Flip = lambda req, own, key: False,
) -> Answer:
    """Return the attention of a batch with any options.

    Args:
        requests: Queries, keys and values of each request.
        options: Arguments of `paged_attention` or `encoder_attention` by name. Options that are
            missing or None are off. `causal` must be present.
        tokens: Rows of the result, including padding rows after the last request.
        flip: Keys whose mask is inverted, for results that are wrong on purpose.
    """
    expect_no_call("attend_by_hand")
    given = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in options.items()
        if value is not None
    }
    query_heads, head_size = (1, 1) if not requests else requests[0].query.shape[1:]
    value_size = requests[0].value.shape[-1] if requests else 1
    out = torch.zeros(tokens, query_heads, value_size, dtype=torch.float64)
    lse = torch.full((query_heads, tokens), -torch.inf, dtype=torch.float64)
    sizes, scores = torch.zeros_like(out), torch.zeros_like(lse)
    lost, moved, joined = torch.zeros_like(lse.T), torch.zeros_like(out), out.clone()
    value_range = torch.zeros(2, *out.shape, dtype=torch.float64)
    scale = given.get("scale", head_size**-0.5)
    token = 0
    for req, request in enumerate(requests):
        kv_heads = request.key.shape[1]
        # consecutive query heads share a kv head
        reads = [head * kv_heads // query_heads for head in range(query_heads)]
        k_scale, v_scale = given.get("k_scale", 1.0), given.get("v_scale", 1.0)
        if request.k_scale is not None and request.v_scale is not None:
            k_scale, v_scale = request.k_scale, request.v_scale
        key = request.key.double() * column(k_scale, kv_heads)
        value = request.value.double() * column(v_scale, kv_heads)
        queries, keys = positions_of(req, len(request.query), len(request.key), given)
        for own, position in enumerate(queries):
            visible = [
                number
                for number in range(len(keys))
                if attends(req, token, own, number, queries, keys, given)
                != flip(req, own, number)
            ]
            distances = [keys[number] - position for number in visible]
            query = request.query[own].double()[:, None]
            # [heads, keys, size]
            products = query * key[visible].transpose(0, 1)[reads]
            score = products.sum(2) * scale
            size = products.abs().sum(2) * scale
            if "logits_soft_cap" in given:
                cap = float(given["logits_soft_cap"])
                size = capped_sizes(score, size, cap)
                score = cap * torch.tanh(score / cap)
            for added in biases(distances, query_heads, given):
                score, size = score + added, size + added.abs()
            if visible:
                scores[:, token] = size.amax(1)
            values = value[visible].transpose(0, 1)[reads]  # [heads, keys, size]
            if "sinks" in given:
                # a sink takes weight and has the value 0
                sink = given["sinks"].double()[:, None]
                score = torch.cat([score, sink], 1)
                size = torch.cat([size, sink.abs()], 1)
                values = torch.nn.functional.pad(values, (0, 0, 0, 1))
            if score.shape[1]:
                lse[:, token] = score.logsumexp(1)
                weights = score.softmax(1)  # [heads, keys]
                own = weights[:, : len(visible)]
                lost[token] = lost_in_sums(own, weights[:, len(visible) :].sum(1))
                out[token] = (weights[:, :, None] * values).sum(1)
                sizes[token] = (weights[:, :, None] * values.abs()).sum(1)
                value_range[:, token] = torch.stack([values.amin(1), values.amax(1)])
                # [heads, 1 row, keys], [heads, keys, size]
                average = sizes[token][:, None]
                for of_token, merged in ((moved, 0.0), (joined, lse[:, token, None])):
                    errors = SCORE_EPS * (size + abs(merged))
                    of_token[token] = moved_by_scores(
                        weights[:, None], errors[:, None], values.abs(), average
                    )[:, 0]
            token += 1
    return Answer(out, lse, sizes, scores, lost, moved, joined, value_range)


def positions_of(
    req: int, query_len: int, key_len: int, given: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the positions of one request's queries and of its keys."""
    context = key_len - query_len
    mask = given.get("tree_mask")
    if mask is None or query_len > mask.shape[1]:
        return list(range(context, key_len)), list(range(key_len))
    # position of a tree token: context + visible new tokens (itself included) - 1
    counts = [sum(mask[req, own, :query_len].tolist()) for own in range(query_len)]
    queries = [context + count - 1 for count in counts]
    return queries, [*range(context), *queries]


def attends(
    req: int,
    token: int,
    own: int,
    number: int,
    queries: list[int],
    keys: list[int],
    given: dict[str, Any],
) -> bool:
    """Return whether the query `own` of a request attends to its key `number`."""
    query, key = queries[own], keys[number]
    if "query_ranges" in given:
        first, last = given["query_ranges"][token].tolist()
        if first >= 0 and first <= key <= last:
            return True
    mask, causal = given.get("tree_mask"), given["causal"]
    new = number - (len(keys) - len(queries))
    if mask is not None and len(queries) <= mask.shape[1]:
        if new >= 0 and not mask[req, own, new]:
            return False
    elif (causal[req] if isinstance(causal, Tensor) else causal) and key > query:
        return False
    window = given.get("sliding_window")
    if window is not None and abs(query - key) >= window:
        return False
    chunk = given.get("attention_chunk_size")
    return chunk is None or query // chunk == key // chunk


def biases(
    distances: list[int], query_heads: int, given: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that are added to the scores, each [query_heads, keys]."""
    added = []
    if "alibi_slopes" in given:
        slopes = given["alibi_slopes"].double()
        added.append(slopes[:, None] * torch.tensor(distances, dtype=torch.float64))
    if "position_bias" in given:
        bias = given["position_bias"].double()
        reach = bias.shape[1] // 2
        entries = [reach + max(-reach, min(reach, away)) for away in distances]
        added.append(bias[:, entries])
    return added


def column(scale: Tensor | float, kv_heads: int) -> Tensor:
    """Return [kv_heads, 1] the scale of each head, or [keys, kv_heads, 1] that of each token."""
    if isinstance(scale, Tensor) and scale.dim() == 2:
        return scale.double()[..., None]
    numbers = torch.as_tensor(scale, dtype=torch.float64).flatten()
    return numbers.expand(kv_heads)[:, None]


def quantise_by_hand(
    tensor: Tensor, scale: Tensor | float, dtype: torch.dtype
) -> Tensor:
    """Return [..., kv_heads, size] in FP8: divided by the scale, clamped and rounded."""
    largest = torch.finfo(dtype).max
    divided = tensor.double() / column(scale, tensor.shape[-2])
    return divided.clamp(-largest, largest).float().to(dtype)


def judge_out(
    out: Tensor,
    answer: Answer,
    same_dtype: Tensor,
    dtype: torch.dtype,
    out_scale: Tensor | float | None = None,
) -> Verdict:
    """Return the comparison of an output with the exact result.

    Args:
        out: The candidate's output.
        answer: The exact result.
        same_dtype: The reference's output, computed and stored in `dtype`.
        dtype: Element type of the queries.
        out_scale: Optional. Scale of an FP8 output. Such an output is correct if it is the
            rounding of a result within the error budget of its row. If None, the output is not
            FP8.
    """
    out, same = out.cpu(), same_dtype.cpu()
    if out_scale is None:
        return judge_rows(out, answer.out, same, dtype, *answer.terms())
    if not out.numel():
        return Verdict(0.0, 0, 0.0, 0.0, True)
    budgets = row_budgets(
        answer.out, same, dtype, answer.sizes, answer.lost, answer.moved
    )
    allowed = allowed_range(
        answer.out, budgets, dtype, answer.value_range, answer.sizes, answer.lost
    )
    out_scale = out_scale.cpu() if isinstance(out_scale, Tensor) else out_scale
    low, high = (
        quantise_by_hand(bound.view(answer.out.shape), out_scale, out.dtype).double()
        for bound in allowed
    )
    stored = out.double()
    finite = bool(stored.isfinite().all())
    outside = ((stored < low) | (stored > high)).flatten(1).any(1)
    row = int(outside.double().argmax())
    return Verdict(
        float("inf") if bool(outside.any()) else 0.0,
        row,
        float((stored - answer.out / float(out_scale))[row].abs().max()),
        float(budgets[row]),
        finite,
    )


def judge_log_sum_exp(lse: Tensor, answer: Answer) -> float:
    """Return the largest error of a log-sum-exp divided by its budget; at most 1 is correct.

    As in `dense.judge_lse`, the budget is eight roundings of the largest score, of the terms added
    to it, and of the result. If a query has no visible keys, only -inf is correct.
    """
    lse = lse.cpu().double()
    empty = answer.lse == -torch.inf
    if bool((lse[empty] != -torch.inf).any()):
        return float("inf")
    error = torch.where(empty, 0.0, lse - answer.lse).abs()
    if not error.numel():
        return 0.0
    size = 1 + answer.scores + torch.where(empty, 0.0, answer.lse).abs()
    share = float((error / (8 * torch.finfo(torch.float32).eps * size)).max())
    return float("inf") if share != share else share
