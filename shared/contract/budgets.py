"""Error budgets: the error that each output row may have, and the verdict on a candidate.

A fixed tolerance is not sufficient: with random data, 1e-2 does not notice one dropped key in
4,096. Each output row therefore has an error budget of its own, from two runs of plain torch on
the same inputs. One run in float64 gives the exact result. One in the candidate's dtype gives the
rounding error of this row. A kernel may have twice that error, plus a few roundings.

The error of torch may be small in a row by chance. The error of each row is therefore assumed to
be at least the 75th percentile over the batch, but not more than one rounding of the averaged
values of this row, so that a row of large numbers does not enlarge the budget of a row of small
ones.

Two more terms of float32 follow from the inputs. A kernel adds one KV tile after the other to a
running sum. Beside a key that outweighs all others each tile may be smaller than the rounding of
that sum: `lost_in_sums`. And a score is a sum of products in some order. Where products cancel, one
rounding of them is many of the score, which changes weights: `moved_by_scores`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
ROUNDS_ONCE = (torch.float16, torch.bfloat16)
"""A 16-bit kernel computes in float32 and rounds its result once, at the end."""
ROUNDINGS_INSIDE = 8
"""A float32 kernel also rounds intermediate results. The exponential of a score of size s turns one
rounding of the score into s roundings of the weight. Measured: with 4, correct kernels exceed the
budget by up to 13 % in rows of one or two elements; with 8 they use 55 % of it."""
SMALLEST_TILE = 16
"""Keys of the smallest KV tile that `lost_in_sums` assumes."""
SMALL = 16
"""A tile is small if it weighs at most so many roundings of the sum. Larger ones differ by more
than a rounding, so that their errors have either sign."""


@dataclass(frozen=True)
class Verdict:
    """The errors of a candidate's rows relative to their budgets.

    Args:
        worst: largest ratio of a row's error to its budget. At most 1 is correct.
        row: index of that row.
        error, budget: of that row, in the unit of the output.
        finite: whether every element is finite.
    """

    worst: float
    row: int
    error: float
    budget: float
    finite: bool

    @property
    def ok(self) -> bool:
        return self.finite and self.worst <= 1.0

    def __str__(self) -> str:
        if not self.finite:
            return f"row {self.row} contains NaN or infinity"
        return (
            f"row {self.row}: error {self.error:.3g}, budget {self.budget:.3g}"
            f" ({self.worst:.2f} of it)"
        )


def row_budgets(
    exact: Tensor,
    same_dtype: Tensor,
    dtype: torch.dtype,
    magnitude: Tensor | None = None,
    joined_lse: Tensor | None = None,
    lost_in_sums: Tensor | None = None,
    moved_by_scores: Tensor | None = None,
    *,
    weight_error: float = 0.0,
) -> Tensor:
    """Return the error budget of each row.

    Args:
        exact: [rows, ...] the result in float64.
        same_dtype: [rows, ...] plain torch's result, computed in `dtype`.
        dtype: the candidate's dtype.
        magnitude: Optional. [rows, ...] the magnitude of the averaged values: the same attention
            over their absolute values. If None, the magnitude of the result, which is smaller
            if values cancel.
        joined_lse: Optional. [rows, ...] the log-sum-exp of rows that were merged from partial
            results. That of each partial result was rounded to float32, and one rounding of a
            logarithm of size s is s roundings of the weight. If None, the rows were not merged.
        lost_in_sums: Optional. [rows, ...] what that function returns. If None, nothing is lost.
        moved_by_scores: Optional. [rows, ...] what that function returns. If None, scores are
            exact.
        weight_error: relative error that each softmax weight may have besides. A kernel that
            multiplies weights and values in FP8 rounds its weights to FP8, by up to half of
            that dtype's epsilon.

    Returns:
        [rows] float64.
    """
    exact, same = _rows(exact), _rows(same_dtype)
    size = exact.abs().amax(1)
    largest = size if magnitude is None else _rows(magnitude).abs().amax(1)
    eps = torch.finfo(dtype).eps
    lost = (same - exact).abs().amax(1)
    typical = lost.quantile(0.75)
    lost = lost.maximum(torch.minimum(typical, eps * largest))
    of_weights = weight_error * largest
    if dtype in ROUNDS_ONCE:
        return FACTOR * lost + eps * size + of_weights
    roundings = largest.new_full(largest.shape, ROUNDINGS_INSIDE)
    if joined_lse is not None:
        size = _rows(joined_lse).abs()
        roundings += torch.where(size.isfinite(), size, 0.0).amax(1)
    budget = FACTOR * lost + roundings * eps * largest + of_weights
    if lost_in_sums is not None:
        # of the weighted values and of the weights
        budget += 2 * _rows(lost_in_sums).amax(1) * largest
    if moved_by_scores is not None:
        budget += eps * _rows(moved_by_scores).amax(1)
    return budget


def moved_by_scores(
    weights: Tensor, sizes: Tensor, values: Tensor, average: Tensor
) -> Tensor:
    """Return how far an output may move if each score has an error of its size, to first order.

    A score that changes by d moves the output by d * weight * |value - output|. The bound on that
    distance counts only the other keys, so that a key with all of the weight moves nothing.

    Args:
        weights: [n, rows, keys] the softmax weights.
        sizes: [n, rows, keys] the sum of the absolute products of each score.
        values: [n, keys, size] absolute values.
        average: [n, rows, size] their average by the weights.

    Returns:
        [n, rows, size] in units of one rounding of the products.
    """
    moved = weights * sizes
    own = torch.bmm(moved * (1 - 2 * weights), values)
    return own + moved.sum(2, keepdim=True) * average


def lost_in_sums(weights: Tensor, sink: Tensor | None = None) -> Tensor:
    """Return the share of a sum of weights that float32 may lose, because tiles of keys are small.

    The sum is computed in order, from the first key or from the last one, in tiles of
    SMALLEST_TILE keys. Adding a tile loses at most half a rounding of the sum, and at most the
    tile. The errors of small tiles may all have the same sign, and those of others are within
    ROUNDINGS_INSIDE. With 43 tiles of 4.7e-8 beside a weight of 1, a kernel on a GPU lost 2.0e-6.

    Args:
        weights: [..., keys] the softmax weights, 0 for masked keys.
        sink: Optional. [...] the weight of a sink, which is added first. If None, there is none.

    Returns:
        [...] in the dtype of the weights.
    """
    eps = torch.finfo(torch.float32).eps
    *rows, keys = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -keys % SMALLEST_TILE))
    tiles = padded.reshape(*rows, -(-keys // SMALLEST_TILE), SMALLEST_TILE).sum(-1)
    lost = weights.new_zeros(weights.shape[:-1])
    for each in (tiles, tiles.flip(-1)):
        sums = each.cumsum(-1)
        if sink is not None:
            sums += sink[..., None]
        loss = torch.minimum(each, eps / 2 * sums)
        lost = lost.maximum(loss.masked_fill(each > SMALL * eps * sums, 0.0).sum(-1))
    return lost


def judge_rows(
    candidate: Tensor,
    exact: Tensor,
    same_dtype: Tensor,
    dtype: torch.dtype,
    magnitude: Tensor | None = None,
    joined_lse: Tensor | None = None,
    lost_in_sums: Tensor | None = None,
    moved_by_scores: Tensor | None = None,
    *,
    weight_error: float = 0.0,
) -> Verdict:
    """Return the errors of the candidate's rows relative to their budgets.

    Args:
        candidate: [rows, ...] the result to judge.
        exact, same_dtype, dtype, magnitude, joined_lse, lost_in_sums, moved_by_scores,
            weight_error: as in `row_budgets`.
    """
    if not candidate.numel():
        return Verdict(0.0, 0, 0.0, 0.0, True)
    terms = joined_lse, lost_in_sums, moved_by_scores
    budgets = row_budgets(
        exact, same_dtype, dtype, magnitude, *terms, weight_error=weight_error
    )
    rows = _rows(candidate)
    bad = ~torch.isfinite(rows).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        return Verdict(float("inf"), row, float("inf"), float(budgets[row]), False)
    errors = (rows - _rows(exact)).abs().amax(1)
    # the budget of a row of zeros is 0: it must be equal
    shares = torch.where(errors == 0, 0.0, errors / budgets)
    row = int(shares.argmax())
    return Verdict(
        float(shares[row]), row, float(errors[row]), float(budgets[row]), True
    )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1).to(torch.float64)
