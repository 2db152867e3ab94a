"""Batched oracle: attention of many calls of one signature at once, padded, on any device.

`brute_force` computes one query at a time and is the oracle of record. This one computes the
padded scores of many requests of a group of calls, in float64 for the exact result and in the
calls' own dtype for the error budgets (`group_verdicts.py`). It shares no code with either twin. A
result that it finds wrong is judged again by `brute_force`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...contract.budgets import (
    ROUNDS_ONCE,
    SCORE_EPS,
    capped_sizes,
    lost_in_sums,
    moved_by_scores,
)
from ..base.judged_call import expect_no_call
from ..cases.options import Call
from .groups import Group, Part


@dataclass(frozen=True)
class Exact:
    """Attention of the live rows of a group.

    Args:
        out: [rows, query_heads, value_head_size].
        lse: [rows, query_heads] natural log-sum-exp.
        sizes: [rows] the largest weighted average of absolute values of a row.
        scores: [rows, query_heads] the largest sum of absolute products of a score.
        lost: [rows] the most that float32 may lose in a sum of weights; 0 for 16-bit calls.
        moved: [rows] how far a rounding of the scores may move a row; the same.
        value_range: [2, rows, query_heads, value_head_size] the smallest and the largest value of
            the request's keys, masked ones too. A sink has the value 0.
    """

    out: Tensor
    lse: Tensor
    sizes: Tensor
    scores: Tensor
    lost: Tensor
    moved: Tensor
    value_range: Tensor


Masks = tuple[Tensor, Tensor]
"""Visible keys and distances, as `visible_keys` returns them."""


def attend_batched(group: Group, dtype: torch.dtype = torch.float64) -> Exact:
    """Return the attention of all live rows of a group.

    Args:
        group: The requests.
        dtype: Element type of the arithmetic.
    """
    return joined([attend_part(part, dtype) for part in group.parts()])


def joined(parts: Sequence[Exact]) -> Exact:
    """Return the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(Exact)]
    rows = {name: [getattr(part, name) for part in parts] for name in names}
    return Exact(
        *(
            torch.cat(parts_of_field, dim=1 if name == "value_range" else 0)
            for name, parts_of_field in rows.items()
        )
    )


def attend_part(
    part: Part,
    dtype: torch.dtype,
    masks: Masks | None = None,
    has_sizes: bool = True,
    is_joined: bool = False,
) -> Exact:
    """Return the attention of all live rows of a part.

    Args:
        part: The requests.
        dtype: Element type of the arithmetic.
        masks: Optional. What `visible_keys` returns for the part. If None, it is computed.
        has_sizes: Whether `sizes` and what follows it are computed. If not, they are empty.
        is_joined: Whether rows were merged from partial results by rounded log-sum-exps.
    """
    expect_no_call("attend_part")
    given = part.call.arguments
    reqs, heads, queries, head_size = part.query.shape
    kv_heads, keys = part.key.shape[1:3]
    scale = given.get("scale", head_size**-0.5)
    visible, distance = masks or visible_keys(part)  # [n, queries, keys]
    hidden = ~visible[:, None]
    shape = reqs, heads, queries, keys
    # the query heads of a kv head are rows of one matrix
    matrices = reqs * kv_heads, heads // kv_heads * queries
    query = _packed(part.query, dtype).view(*matrices, head_size)
    key = _read(part, part.key, "k_scale", dtype).flatten(0, 1)
    value = _read(part, part.value, "v_scale", dtype).flatten(0, 1)
    score = torch.bmm(query, key.transpose(1, 2)).view(shape).mul_(scale)
    uncapped = None
    if "logits_soft_cap" in given:
        cap = given["logits_soft_cap"]
        uncapped = score.clone() if has_sizes else None
        score = score.div_(cap).tanh_().mul_(cap)
    biases = _biases(part, distance, dtype)
    for bias in biases:
        score.add_(bias)
    score.masked_fill_(hidden, -torch.inf)
    sink = score.new_full((reqs, heads, 1, 1), -torch.inf)
    if "sinks" in given:
        sink = part.options["sinks"].to(dtype)[:, :, None, None]
    weights, of_sink, lse = _softmax(score, sink)
    weights = weights.view(*matrices, keys)

    def rows(tensor: Tensor) -> Tensor:
        """Return the live rows of [n, heads, queries, ...]."""
        return tensor[part.request, :, part.own]

    out = rows(torch.bmm(weights, value).view(*shape[:3], -1))
    if not has_sizes:
        none = out.new_empty(0)
        return Exact(out, rows(lse), none, none, none, none, none.view(0, 0))
    # step: the sizes of the sums, for the error budgets
    value_range = _value_range(value.view(reqs, kv_heads, keys, -1), "sinks" in given)
    value_range = value_range.repeat_interleave(heads // kv_heads, 2)
    average = torch.bmm(weights, value.abs_())
    size = torch.bmm(query.abs_(), key.abs_().transpose(1, 2)).view(shape).mul_(scale)
    if uncapped is not None:
        size = capped_sizes(uncapped, size, given["logits_soft_cap"])
    for bias in biases:
        size.add_(bias.abs())
    size.masked_fill_(hidden, 0.0)
    largest = size.amax(3) if keys else lse.new_zeros(lse.shape)
    lost = moved = lse.new_zeros(lse.shape)
    if part.call.dtype not in ROUNDS_ONCE:
        lost = lost_in_sums(weights.view(shape), of_sink.squeeze(3))
        if is_joined:
            size.add_(lse.masked_fill(lse == -torch.inf, 0.0).abs()[..., None])
        errors = SCORE_EPS * size.view(*matrices, keys)
        if "sinks" in given:
            # a sink is one more key, with the value 0
            its = SCORE_EPS * sink.abs().expand_as(of_sink)
            weights = torch.cat([weights, of_sink.view(*matrices, 1)], 2)
            errors = torch.cat([errors, its.reshape(*matrices, 1)], 2)
            value = torch.nn.functional.pad(value, (0, 0, 0, 1))
        moved = moved_by_scores(weights, errors, value, average)
        moved = moved.amax(2).view(lse.shape)
    average = average.amax(2).view(lse.shape)
    lost, moved = (rows(bound).amax(1) for bound in (lost, moved))
    return Exact(
        out, rows(lse), rows(average).amax(1), rows(largest), lost, moved,
        value_range[:, part.request],
    )  # fmt: skip


def _softmax(score: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of scores and of sinks, and the log-sum-exp.

    Args:
        score: [n, heads, queries, keys], overwritten.
        sink: [n, heads, 1, 1], -inf if there is none.

    Returns:
        [n, heads, queries, keys], [n, heads, queries, 1], [n, heads, queries].
    """
    shape = *score.shape[:3], 1
    top = sink.expand(shape)
    if score.shape[3]:
        top = top.maximum(score.amax(3, keepdim=True))
    shift = top.masked_fill(top == -torch.inf, 0.0)
    p, of_sink = score.sub_(shift).exp_(), (sink - shift).exp()
    total = p.sum(3, keepdim=True) + of_sink
    lse = (top + total.log()).squeeze(3)
    total.clamp_(min=1.0)
    return p.div_(total), of_sink.div_(total), lse


def _value_range(value: Tensor, has_sinks: bool) -> Tensor:
    """Return [2, n, kv_heads, size] the smallest and the largest value [n, kv_heads, keys, size].

    What padding contains are copies of values.
    """
    if not value.shape[2]:
        return torch.zeros_like(value[:, :, :1, :]).squeeze(2).repeat(2, 1, 1, 1)
    found = torch.stack([value.amin(2), value.amax(2)])
    if has_sinks:
        found[0].clamp_(max=0.0)
        found[1].clamp_(min=0.0)
    return found


def _packed(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers as a packed tensor of its own, in a dtype."""
    return torch.empty(stored.shape, dtype=dtype, device=stored.device).copy_(stored)


def _read(part: Part, stored: Tensor, scale: str, dtype: torch.dtype) -> Tensor:
    """Return stored keys or values as numbers, in a packed tensor of its own."""
    numbers = _packed(stored, dtype)
    if scale in part.options:
        return numbers.mul_(part.options[scale][:, :, None, None])
    factor: float = part.call.arguments.get(scale, 1.0)
    return numbers if factor == 1.0 else numbers.mul_(factor)


def visible_keys(part: Part) -> tuple[Tensor, Tensor]:
    """Return which keys each query attends to, and key position minus query position.

    Returns:
        [n, queries, keys] bool, and [n, queries, keys] int64.
    """
    given, options = part.call.arguments, part.options
    queries, keys = part.query.shape[2], part.key.shape[2]
    device = part.query.device
    own = torch.arange(queries, device=device)
    number = torch.arange(keys, device=device)
    context = part.key_lens - part.query_lens
    query = (context[:, None] + own).expand(len(context), -1)  # [n, queries]
    key = number.expand(len(context), -1)  # [n, keys]
    live = (own < part.query_lens[:, None])[:, :, None]
    live = live & (number < part.key_lens[:, None])[:, None]
    new = number - context[:, None]  # [n, keys] index among the new tokens
    tree = options.get("tree_mask")
    is_tree = None
    if tree is not None:
        width = tree.shape[1]
        is_tree = part.query_lens <= width
        valid = torch.arange(width, device=device) < part.query_lens[:, None]
        ancestors = tree & valid[:, None] & valid[:, :, None]
        depth = ancestors.sum(2)  # [n, width]
        at = own.clamp(max=width - 1)
        of_tree = context[:, None] + depth[:, at] - 1
        query = torch.where(is_tree[:, None], of_tree, query)
        its = depth.gather(1, new.clamp(0, width - 1))
        is_new = is_tree[:, None] & (new >= 0)
        key = torch.where(is_new, context[:, None] + its - 1, key)
    distance = key[:, None] - query[:, :, None]
    causal = given.get("causal", call_is_causal(part.call))
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


def _biases(part: Part, distance: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors that are added to the scores, [n, heads, queries, keys]."""
    added = []
    if "alibi_slopes" in part.options:
        slopes = part.options["alibi_slopes"].to(dtype)
        added.append(slopes[:, :, None, None] * distance[:, None].to(dtype))
    if "position_bias" in part.options:
        bias = part.options["position_bias"].to(dtype)  # [n, heads, entries]
        reach = bias.shape[2] // 2
        entry = (distance.clamp(-reach, reach) + reach)[:, None]
        entry = entry.expand(-1, bias.shape[1], -1, -1)
        added.append(bias.gather(2, entry.flatten(2)).view(entry.shape))
    return added
