"""Batched oracle: attention of many calls of one signature at once, padded, on any device.

`brute_force` computes one query at a time and is the oracle of record. This one computes the
padded scores of all requests of a group of calls, in float64 for the exact result and in the
calls' own dtype for the error budgets. It shares no code with either twin. A result that it finds
wrong is judged again by `brute_force`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...contract.budgets import FACTOR, ROUNDINGS_INSIDE, ROUNDS_ONCE
from ..generators.drawn_numbers import rows_of, to_device
from ..generators.options import Call
from .groups import Group, Rows

MAX_SCORES = 1 << 22
"""Scores of a group that are computed at once, in elements."""


@dataclass(frozen=True)
class Exact:
    """Attention of the live rows of a group.

    Args:
        out: [rows, query_heads, value_head_size].
        lse: [rows, query_heads] natural log-sum-exp.
        sizes: [rows] the largest weighted average of absolute values of a row.
        scores: [rows, query_heads] the largest sum of absolute products of a score.
    """

    out: Tensor
    lse: Tensor
    sizes: Tensor
    scores: Tensor


Masks = tuple[Tensor, Tensor]
"""Visible keys and distances, as `visible_keys` returns them."""


def attend_batched(
    group: Group,
    dtype: torch.dtype = torch.float64,
    masks: Masks | None = None,
    has_sizes: bool = True,
) -> Exact:
    """Return the attention of all live rows of a group.

    Args:
        group: The requests.
        dtype: Element type of the arithmetic.
        masks: Optional. What `visible_keys` returns for the group. If None, it is computed.
        has_sizes: Whether `sizes` and `scores` are computed. If not, they are empty.
    """
    given = group.call.arguments
    reqs, queries, heads, head_size = group.query.shape
    keys, kv_heads = group.key.shape[1:3]
    share = heads // kv_heads
    scale = given.get("scale", head_size**-0.5)
    visible, distance = masks or visible_keys(group)  # [n, queries, keys]
    query = group.query.to(dtype).view(reqs, queries, kv_heads, share, head_size)
    key = _read(group, group.key, "k_scale", dtype)
    value = _read(group, group.value, "v_scale", dtype)
    score = torch.einsum("nqhgd,nkhd->nhgqk", query, key)
    score = (score * scale).reshape(reqs, heads, queries, keys)
    if "logits_soft_cap" in given:
        cap = given["logits_soft_cap"]
        score = cap * torch.tanh(score / cap)
    biases = _biases(group, distance, dtype)
    for bias in biases:
        score = score + bias
    score = score.masked_fill(~visible[:, None], -torch.inf)
    lse = score.logsumexp(3)
    if "sinks" in given:
        sinks = group.options["sinks"].to(dtype)[:, :, None]
        lse = torch.logaddexp(lse, sinks)
    finite = lse.masked_fill(lse.isinf(), 0.0)
    weights = torch.exp(score - finite[..., None])  # [n, heads, queries, keys]
    weights = weights.view(reqs, kv_heads, share, queries, keys)
    rows = group.request, group.own
    out = torch.einsum("nhgqk,nkhd->nqhgd", weights, value)
    out, lse_rows = out.reshape(reqs, queries, heads, -1)[rows], lse.transpose(1, 2)
    if not has_sizes:
        return Exact(out, lse_rows[rows], out.new_empty(0), out.new_empty(0))
    # step: the sizes of the sums, for the error budgets
    size = torch.einsum("nqhgd,nkhd->nhgqk", query.abs(), key.abs()) * scale
    size = size.reshape(reqs, heads, queries, keys)
    for bias in biases:
        size = size + bias.abs()
    size = size.masked_fill(~visible[:, None], 0.0)
    largest = size.amax(3) if keys else lse.new_zeros(lse.shape)
    sizes = torch.einsum("nhgqk,nkhd->nqhgd", weights, value.abs()).flatten(2).amax(2)
    return Exact(out, lse_rows[rows], sizes[rows], largest.transpose(1, 2)[rows])


def _read(group: Group, stored: Tensor, scale: str, dtype: torch.dtype) -> Tensor:
    """Return stored keys or values as numbers."""
    numbers = stored.to(dtype)
    if scale in group.options:
        return (numbers * group.options[scale][:, None, :, None]).to(dtype)
    factor: float = group.call.arguments.get(scale, 1.0)
    return numbers * factor


def visible_keys(group: Group) -> tuple[Tensor, Tensor]:
    """Return which keys each query attends to, and key position minus query position.

    Returns:
        [n, queries, keys] bool, and [n, queries, keys] int64.
    """
    given, options = group.call.arguments, group.options
    queries, keys = group.query.shape[1], group.key.shape[1]
    device = group.query.device
    own = torch.arange(queries, device=device)
    number = torch.arange(keys, device=device)
    context = group.key_lens - group.query_lens
    query = (context[:, None] + own).expand(len(context), -1)  # [n, queries]
    key = number.expand(len(context), -1)  # [n, keys]
    live = (own < group.query_lens[:, None])[:, :, None]
    live = live & (number < group.key_lens[:, None])[:, None]
    new = number - context[:, None]  # [n, keys] index among the new tokens
    tree = options.get("tree_mask")
    is_tree = None
    if tree is not None:
        width = tree.shape[1]
        is_tree = group.query_lens <= width
        valid = torch.arange(width, device=device) < group.query_lens[:, None]
        ancestors = tree & valid[:, None] & valid[:, :, None]
        depth = ancestors.sum(2)  # [n, width]
        at = own.clamp(max=width - 1)
        of_tree = context[:, None] + depth[:, at] - 1
        query = torch.where(is_tree[:, None], of_tree, query)
        its = depth.gather(1, new.clamp(0, width - 1))
        is_new = is_tree[:, None] & (new >= 0)
        key = torch.where(is_new, context[:, None] + its - 1, key)
    distance = key[:, None] - query[:, :, None]
    causal = given.get("causal", call_is_causal(group.call))
    flags = options.get("causal")
    past = distance <= 0
    if flags is not None:
        visible = past | ~flags[:, None, None]
    elif causal:
        visible = past
    else:
        visible = torch.ones_like(past)
    if tree is not None and is_tree is not None:
        at = own.clamp(max=tree.shape[1] - 1)
        allowed = tree[:, at].gather(
            2, new.clamp(0, tree.shape[1] - 1)[:, None].expand(-1, queries, -1)
        )
        allowed = allowed | (new < 0)[:, None]
        visible = torch.where(is_tree[:, None, None], allowed, visible)
    window = given.get("sliding_window")
    if window is not None:
        visible = visible & (distance.abs() < window)
    chunk = given.get("attention_chunk_size")
    if chunk is not None:
        visible = visible & (
            torch.div(key, chunk, rounding_mode="floor")[:, None]
            == torch.div(query, chunk, rounding_mode="floor")[:, :, None]
        )
    if "query_ranges" in options:
        first, last = options["query_ranges"].long().unbind(2)
        inside = (key[:, None] >= first[:, :, None]) & (
            key[:, None] <= last[:, :, None]
        )
        visible = visible | (inside & (first >= 0)[:, :, None])
    return visible & live, distance


def call_is_causal(call: Call) -> bool:
    """Return whether the operation is causal by default."""
    return call.operation == "paged_attention"


def _biases(group: Group, distance: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors that are added to the scores, [n, heads, queries, keys]."""
    added = []
    if "alibi_slopes" in group.options:
        slopes = group.options["alibi_slopes"].to(dtype)
        added.append(slopes[:, :, None, None] * distance[:, None].to(dtype))
    if "position_bias" in group.options:
        bias = group.options["position_bias"].to(dtype)  # [n, heads, entries]
        reach = bias.shape[2] // 2
        entry = (distance.clamp(-reach, reach) + reach)[:, None]
        entry = entry.expand(-1, bias.shape[1], -1, -1)
        added.append(bias.gather(2, entry.flatten(2)).view(entry.shape))
    return added


def judge_group(
    group: Group,
    results: Sequence[tuple[Tensor, Tensor | None]],
    is_joined: bool = False,
) -> list[float]:
    """Return for each call its largest error divided by the error budget; inf if it is not finite.

    Args:
        group: The requests of the calls.
        results: Output and log-sum-exp of each call. Rows past the last request must be 0 and
            -inf.
        is_joined: Whether rows were merged from partial results by rounded log-sum-exps.
    """
    masks = visible_keys(group)
    exact = attend_batched(group, masks=masks)
    same = attend_batched(group, group.call.dtype, masks, has_sizes=False)
    device = exact.out.device
    lengths = np.array([len(out) for out, _ in results])
    calls, rows = len(results), int(lengths.max())
    lens = to_device(lengths, device)
    all_rows = Rows(calls, rows, *to_device(np.stack(rows_of(lengths)), device))
    shape = (calls, rows, *exact.out.shape[1:])
    place = group.index, group.token
    outs = all_rows.pad([_numbers(out) for out, _ in results])
    right = exact.out.new_zeros(shape)
    right[place] = exact.out
    # step: budget each row as contract.budgets does
    its_dtype = group.call.dtype
    lost = torch.full((calls, rows), torch.nan, dtype=torch.float64, device=device)
    lost = lost.masked_fill(torch.arange(rows, device=device) < lens[:, None], 0.0)
    rounded = same.out.to(its_dtype).double()
    lost[place] = (rounded - exact.out).abs().flatten(1).amax(1)
    size, largest = torch.zeros_like(lost), torch.zeros_like(lost)
    size[place] = exact.out.abs().flatten(1).amax(1)
    largest[place] = exact.sizes
    eps = torch.finfo(its_dtype).eps
    typical = lost.nanquantile(0.75, dim=1)[:, None]
    lost = lost.nan_to_num(0.0).maximum(torch.minimum(typical, eps * largest))
    budget = FACTOR * lost + eps * size
    if its_dtype not in ROUNDS_ONCE:
        roundings = torch.full_like(largest, ROUNDINGS_INSIDE)
        if is_joined:
            its_lse = exact.lse.abs()
            its_lse = torch.where(its_lse.isfinite(), its_lse, 0.0).amax(1)
            roundings[place] += its_lse
        budget = FACTOR * lost + roundings * eps * largest
    # step: compare output and log-sum-exp
    if "out_scale" not in group.call.arguments:
        error = (outs.double() - right).abs().flatten(2).amax(2)
        shares = torch.where(error == 0, 0.0, error / budget)
    else:
        shares = _outside_fp8(group, outs, right, budget, results)
    worst = shares.nan_to_num(torch.inf, torch.inf).amax(1)
    if results[0][1] is not None:
        worst = worst.maximum(_lse_shares(group, exact, results, all_rows))
    return [float(each) for each in worst.tolist()]


def _numbers(out: Tensor) -> Tensor:
    """Return an output in a dtype that torch can pad."""
    return out.float() if out.element_size() == 1 else out


def _outside_fp8(
    group: Group,
    outs: Tensor,
    right: Tensor,
    budget: Tensor,
    results: Sequence[tuple[Tensor, Tensor | None]],
) -> Tensor:
    """Return inf for rows with an FP8 number that is not the rounding of a result in its budget."""
    dtype = results[0][0].dtype
    most = torch.finfo(dtype).max
    scale = group.out_scales[:, None, None, None]

    def rounded(numbers: Tensor) -> Tensor:
        clamped = (numbers / scale).clamp(-most, most).float()
        return clamped.to(dtype).double()

    low, high = (rounded(right + sign * budget[..., None, None]) for sign in (-1, 1))
    found = outs.double()
    outside = (found < low) | (found > high) | ~found.isfinite()
    return torch.where(outside.flatten(2).any(2), torch.inf, 0.0)


def _lse_shares(
    group: Group,
    exact: Exact,
    results: Sequence[tuple[Tensor, Tensor | None]],
    rows: Rows,
) -> Tensor:
    """Return for each call the largest error of its log-sum-exps divided by their budget."""
    lses = [lse.T for _, lse in results if lse is not None]
    found = rows.pad(lses, -torch.inf).double()
    right = found.new_full(found.shape, -torch.inf)
    scores = torch.zeros_like(right)
    place = group.index, group.token
    right[place], scores[place] = exact.lse, exact.scores
    empty = right == -torch.inf
    error = (found - right).abs().masked_fill(empty, 0.0)
    size = 1 + scores + right.abs().masked_fill(empty, 0.0)
    budget = 8 * torch.finfo(torch.float32).eps * size
    share = (error / budget).nan_to_num(torch.inf, torch.inf)
    share = torch.where(empty & (found != -torch.inf), torch.inf, share)
    return share.flatten(1).amax(1)
