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

from ...contract.budgets import ROUNDS_ONCE, lost_in_sums, moved_by_scores
from ..generators.options import Call
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
        moved: [rows] how far a rounding of the scores' products may move a row; the same.
    """

    out: Tensor
    lse: Tensor
    sizes: Tensor
    scores: Tensor
    lost: Tensor
    moved: Tensor


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
    names = [each.name for each in fields(Exact)]
    return Exact(
        *(torch.cat([getattr(each, name) for each in parts]) for name in names)
    )


def attend_part(
    part: Part,
    dtype: torch.dtype,
    masks: Masks | None = None,
    has_sizes: bool = True,
) -> Exact:
    """Return the attention of all live rows of a part.

    Args:
        part: The requests.
        dtype: Element type of the arithmetic.
        masks: Optional. What `visible_keys` returns for the part. If None, it is computed.
        has_sizes: Whether `sizes` and what follows it are computed. If not, they are empty.
    """
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
    if "logits_soft_cap" in given:
        cap = given["logits_soft_cap"]
        score = score.div_(cap).tanh_().mul_(cap)
    biases = _biases(part, distance, dtype)
    for bias in biases:
        score.add_(bias)
    score.masked_fill_(hidden, -torch.inf)
    lse = score.logsumexp(3)  # [n, heads, queries]
    if "sinks" in given:
        lse = torch.logaddexp(lse, part.options["sinks"].to(dtype)[:, :, None])
    finite = lse.masked_fill(lse.isinf(), 0.0)
    weights = score.sub_(finite[..., None]).exp_().view(*matrices, keys)

    def rows(tensor: Tensor) -> Tensor:
        """Return the live rows of [n, heads, queries, ...]."""
        return tensor[part.request, :, part.own]

    out = rows(torch.bmm(weights, value).view(*shape[:3], -1))
    if not has_sizes:
        none = out.new_empty(0)
        return Exact(out, rows(lse), none, none, none, none)
    # step: the sizes of the sums, for the error budgets
    average = torch.bmm(weights, value.abs_())
    size = torch.bmm(query.abs_(), key.abs_().transpose(1, 2)).view(shape).mul_(scale)
    for bias in biases:
        size.add_(bias.abs())
    size.masked_fill_(hidden, 0.0)
    largest = size.amax(3) if keys else lse.new_zeros(lse.shape)
    lost = moved = lse.new_zeros(lse.shape)
    if part.call.dtype not in ROUNDS_ONCE:
        sizes = size.view(*matrices, keys)
        moved = moved_by_scores(weights, sizes, value, average)
        moved = moved.amax(2).view(lse.shape)
        sink = None
        if "sinks" in given:
            sink = (part.options["sinks"].to(dtype)[:, :, None] - finite).exp()
        lost = lost_in_sums(weights.view(shape), sink)
    average = average.amax(2).view(lse.shape)
    by_row = (rows(each).amax(1) for each in (lost, moved))
    return Exact(out, rows(lse), rows(average).amax(1), rows(largest), *by_row)


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
