"""Verdicts on groups of calls: the errors of all rows relative to the error budgets of their calls.

`contract.budgets` defines the budgets. Here those of all calls of a group are computed at once.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...contract.budgets import FACTOR, ROUNDINGS_INSIDE, ROUNDS_ONCE
from ..cases.drawn_numbers import to_device
from .batched import Exact, attend_part, joined, visible_keys
from .groups import Group, ragged_rows

Output = tuple[Tensor, Tensor | None]
"""Output and log-sum-exp of a call."""


def judge_group(
    group: Group, results: Sequence[Output], is_joined: bool = False
) -> list[float]:
    """Return what `shares_of_group` returns as numbers, which waits for the device."""
    return [
        float(share) for share in shares_of_group(group, results, is_joined).tolist()
    ]


def shares_of_group(
    group: Group, results: Sequence[Output], is_joined: bool = False
) -> Tensor:
    """Return for each call its largest error divided by the error budget; inf if it is not finite.

    Args:
        group: The requests of the calls.
        results: Output and log-sum-exp of each call. Rows past the last request must be 0 and
            -inf.
        is_joined: Whether rows were merged from partial results by rounded log-sum-exps.

    Returns:
        [calls] on the device. Nothing waits for it.
    """
    lengths = np.array([len(out) for out, _ in results])
    total = int(lengths.sum())
    if not total:
        return torch.zeros(len(results))
    exact, same = _attention(group, results[0][0].shape[1:], is_joined)
    lens = to_device(lengths, exact.out.device)
    calls, own = ragged_rows(lens, total)
    live = (lens.cumsum(0) - lens)[group.index] + group.token
    padded = len(lengths), int(lengths.max())
    outs = torch.cat([_numbers(out) for out, _ in results]).double()
    right = torch.zeros_like(outs)
    right[live] = exact.out
    smallest, greatest = right.clone(), right.clone()
    smallest[live] = exact.value_range[0].minimum(exact.out)
    greatest[live] = exact.value_range[1].maximum(exact.out)
    size = outs.new_zeros(total)
    largest, lost = size.clone(), size.clone()
    # step: budget each row as contract.budgets does
    its_dtype = group.call.dtype
    rounded = same.out.to(its_dtype).double()
    off = (rounded - exact.out).masked_fill(~rounded.isfinite(), 0.0)
    lost[live] = _largest(off)
    size[live] = _largest(exact.out)
    largest[live] = exact.sizes
    eps = torch.finfo(its_dtype).eps
    of_calls = outs.new_full(padded, torch.nan)
    of_calls[calls, own] = lost
    typical = of_calls.nanquantile(0.75, dim=1)[calls]
    lost = lost.nan_to_num(0.0).maximum(torch.minimum(typical, eps * largest))
    budget = FACTOR * lost + eps * size
    most = _largest(smallest).maximum(_largest(greatest)).maximum(largest)
    least = 2 * eps * most
    if its_dtype not in ROUNDS_ONCE:
        roundings = torch.full_like(largest, ROUNDINGS_INSIDE)
        roundings[live] += 2 * exact.lost / eps
        budget = FACTOR * lost + roundings * eps * largest
        budget[live] += exact.moved
        least = roundings * eps * most
    # step: bound the budgets by the values
    budget, least = budget[:, None, None], least[:, None, None]
    low = (right - budget).maximum(smallest - least)
    high = (right + budget).minimum(greatest + least)
    # step: compare output and log-sum-exp
    if "out_scale" in group.call.arguments:
        scale = group.out_scales[calls][:, None, None]
        shares = _outside_fp8(outs, low, high, scale, results[0][0].dtype)
    else:
        error = (outs - right).abs()
        allowed = torch.where(outs > right, high - right, right - low)
        shares = torch.where(error == 0, 0.0, error / allowed).flatten(1).amax(1)
    shares = shares.nan_to_num(torch.inf, torch.inf)
    if results[0][1] is not None:
        lses = torch.cat([lse.T for _, lse in results if lse is not None]).double()
        shares = shares.maximum(_lse_shares(exact, lses, live))
    of_calls = outs.new_zeros(padded)
    of_calls[calls, own] = shares
    return of_calls.amax(1)


def _attention(
    group: Group, shape: Sequence[int], is_joined: bool
) -> tuple[Exact, Exact]:
    """Return the exact attention of a group, and that in the calls' own dtype.

    Args:
        group: The requests.
        shape: Heads and size of a row, which a group without live rows does not know.
        is_joined: Whether rows were merged from partial results by rounded log-sum-exps.
    """
    exact, same = [], []
    for part in group.parts():
        masks = visible_keys(part)
        exact.append(attend_part(part, torch.float64, masks, is_joined=is_joined))
        same.append(attend_part(part, group.call.dtype, masks, has_sizes=False))
    if exact:
        return joined(exact), joined(same)
    rows = group.query.new_empty((0, *shape), dtype=torch.float64)
    none, zeros = rows[:, :, 0], rows[:, 0, 0]
    empty = Exact(rows, none, zeros, none, zeros, zeros, rows.expand(2, *rows.shape))
    return empty, empty


def _largest(rows: Tensor) -> Tensor:
    """Return [rows] the largest absolute value of each row."""
    return rows.abs().flatten(1).amax(1)


def _numbers(out: Tensor) -> Tensor:
    """Return an output in a dtype that torch can concatenate."""
    return out.float() if out.element_size() == 1 else out


def _outside_fp8(
    outs: Tensor, low: Tensor, high: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return inf for rows with an FP8 number that is not the rounding of an allowed result."""
    most = torch.finfo(dtype).max

    def rounded(numbers: Tensor) -> Tensor:
        clamped = (numbers / scale).clamp(-most, most).float()
        return clamped.to(dtype).double()

    outside = (outs < rounded(low)) | (outs > rounded(high)) | ~outs.isfinite()
    return torch.where(outside.flatten(1).any(1), torch.inf, 0.0).to(outs.dtype)


def _lse_shares(exact: Exact, found: Tensor, live: Tensor) -> Tensor:
    """Return for each row the largest error of its log-sum-exps divided by their budget."""
    right = torch.full_like(found, -torch.inf)
    scores = torch.zeros_like(found)
    right[live], scores[live] = exact.lse, exact.scores
    empty = right == -torch.inf
    error = (found - right).abs().masked_fill(empty, 0.0)
    size = 1 + scores + right.abs().masked_fill(empty, 0.0)
    budget = 8 * torch.finfo(torch.float32).eps * size
    share = (error / budget).nan_to_num(torch.inf, torch.inf)
    share = torch.where(empty & (found != -torch.inf), torch.inf, share)
    return share.amax(1)
