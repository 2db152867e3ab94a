"""Error budgets: the error that each output row may have, and the verdict on a candidate.

A fixed tolerance is not sufficient: with random data, 1e-2 does not notice one dropped key in
4,096. Each output row therefore has an error budget of its own, from two runs of plain torch on
the same inputs. One run in float64 gives the exact result. One in the candidate's dtype gives the
rounding error of this row. A kernel may have twice that error, plus a few roundings.

The error of torch may be small in a row by chance. The error of each row is therefore assumed to
be at least the 75th percentile over the batch, but not more than one rounding of the averaged
values of this row, so that a row of large numbers does not enlarge the budget of a row of small
ones.

Two more terms follow from the inputs. A kernel adds one KV tile after the other to a running sum.
Beside a key that outweighs all others each tile may be smaller than the rounding of that sum:
`lost_in_sums`. And a score, or a log-sum-exp, is a rounded float32 number. One rounding of a score
of 1e8 is 8, which changes the ratio of two weights by e^8: `moved_by_scores`.

No rounding changes that weights are positive and are divided by their own sum. So whatever the
weights are, an element is between the smallest and the largest value that it averages, up to the
roundings of the average. This bounds every budget: `allowed_range`.
"""

import math
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
SCORE_EPS = torch.finfo(torch.float32).eps
"""Scores and log-sum-exps are float32 in every kernel."""
LARGEST_SCORE_ERROR = 100.0
"""A larger error of a score says no more: the ratio of two weights is not known at all."""
SMALLEST_TILE = 16
"""Keys of the smallest KV tile that `lost_in_sums` assumes."""
SMALL = 16
"""A tile is small if it weighs at most so many roundings of the sum. Larger ones differ by more
than a rounding, so that their errors have either sign."""


@dataclass(frozen=True)
class Verdict:
    """The errors of a candidate's rows relative to their budgets.

    Args:
        worst: largest ratio of an element's error to its budget. At most 1 is correct.
        row: index of the row of that element.
        error, budget: of that element, in the unit of the output.
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
        if math.isnan(self.worst):
            return f"row {self.row}: the exact result contains NaN or infinity"
        return (
            f"row {self.row}: error {self.error:.3g}, budget {self.budget:.3g}"
            f" ({self.worst:.2f} of it)"
        )


def row_budgets(
    exact: Tensor,
    same_dtype: Tensor,
    dtype: torch.dtype,
    magnitude: Tensor | None = None,
    lost_in_sums: Tensor | None = None,
    moved_by_scores: Tensor | None = None,
    *,
    weight_error: float = 0.0,
) -> Tensor:
    """Return the error budget of each row, before it is bounded by the values (`allowed_range`).

    Args:
        exact: [rows, ...] the result in float64.
        same_dtype: [rows, ...] plain torch's result, computed in `dtype`. Where scores are beyond
            that dtype it is not finite, and counts as exact.
        dtype: the candidate's dtype.
        magnitude: Optional. [rows, ...] the magnitude of the averaged values: the same attention
            over their absolute values. If None, the magnitude of the result, which is smaller
            if values cancel.
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
    lost = (same - exact).abs().masked_fill(~same.isfinite(), 0.0).amax(1)
    typical = lost.quantile(0.75)
    lost = lost.maximum(torch.minimum(typical, eps * largest))
    budget = FACTOR * lost + weight_error * largest
    if dtype in ROUNDS_ONCE:
        budget += eps * size
    else:
        budget += _roundings(dtype, largest, lost_in_sums)
    if moved_by_scores is not None:
        budget += _rows(moved_by_scores).amax(1)
    return budget


def _roundings(
    dtype: torch.dtype, largest: Tensor, lost_in_sums: Tensor | None
) -> Tensor:
    """Return [rows] what an average of values of this magnitude may lose, whatever its weights."""
    eps = torch.finfo(dtype).eps
    if dtype in ROUNDS_ONCE:
        # weights are rounded to 16 bits before they are multiplied, and then the result is
        return 2 * eps * largest
    roundings = ROUNDINGS_INSIDE * eps * largest
    if lost_in_sums is not None:
        # of the weighted values and of the weights
        roundings = roundings + 2 * _rows(lost_in_sums).amax(1) * largest
    return roundings


def allowed_range(
    exact: Tensor,
    budgets: Tensor,
    dtype: torch.dtype,
    value_range: Tensor | None = None,
    magnitude: Tensor | None = None,
    lost_in_sums: Tensor | None = None,
    *,
    weight_error: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number that each element may be.

    An element may differ from the exact one by its row's budget. It may not be further outside of
    the range of the values that it averages than by the roundings of an average.

    Args:
        exact: [rows, ...] the result in float64.
        budgets: [rows] what `row_budgets` returns.
        dtype: the candidate's dtype.
        value_range: Optional. [2, rows, ...] the smallest and the largest value that each element
            averages; 0 is one of them for a sink. If None, only the budgets count.
        magnitude, lost_in_sums, weight_error: as in `row_budgets`.

    Returns:
        [rows, elements] float64, twice.

    Example:
        Two equal keys with the values 1 and 3, whose scores are 1e8: the mean is 2, but the ratio
        of their float32 weights is not known. Every number from 1 to 3 is allowed, and no other.
    """
    exact = _rows(exact)
    low, high = exact - budgets[:, None], exact + budgets[:, None]
    if value_range is None:
        return low, high
    smallest, greatest = _rows(value_range[0]), _rows(value_range[1])
    largest = torch.maximum(smallest.abs(), greatest.abs()).amax(1)
    if magnitude is not None:
        largest = largest.maximum(_rows(magnitude).abs().amax(1))
    least = _roundings(dtype, largest, lost_in_sums) + weight_error * largest
    low = low.maximum(torch.minimum(smallest, exact) - least[:, None])
    return low, high.minimum(torch.maximum(greatest, exact) + least[:, None])


def moved_by_scores(
    weights: Tensor, errors: Tensor, values: Tensor, average: Tensor
) -> Tensor:
    """Return how far an output may move if each score has an error.

    A score that is wrong by d changes its weight by a factor between exp(-d) and exp(d), and moves
    the output towards the key's value, or away from it. The bound on their distance counts only
    the other keys, so that a key with all of the weight moves nothing.

    Args:
        weights: [n, rows, keys] the softmax weights. A sink is one more key, with the value 0.
        errors: [n, rows, keys] the error that each score may have: SCORE_EPS times the sum of its
            absolute products (`capped_sizes` with a soft cap), and times the log-sum-exp of a
            row that was merged from partial results, which are rounded float32 numbers too.
        values: [n, keys, size] absolute values.
        average: [n, rows, size] their average by the weights.

    Returns:
        [n, rows, size] in the unit of the values.
    """
    errors = errors.clamp(max=LARGEST_SCORE_ERROR)
    moved = weights * errors.expm1()
    own = torch.bmm(moved * (1 - 2 * weights), values)
    # the weights are divided by their own sum, which is at least this; 0 without a visible key
    total = (weights * (-errors).exp()).sum(2, keepdim=True)
    total = total.clamp(min=torch.finfo(total.dtype).tiny)
    return (own + moved.sum(2, keepdim=True) * average) / total


def capped_sizes(scores: Tensor, sizes: Tensor, cap: float) -> Tensor:
    """Return the sizes of scores after a soft cap. A score far beyond the cap is as good as exact.

    Args:
        scores: [...] before the cap.
        sizes: [...] the sum of the absolute products of each.
        cap: the soft cap.

    Returns:
        [...] at most the sizes; times SCORE_EPS, how far a capped score may be off.
    """
    high, low = ((scores + sign * SCORE_EPS * sizes) / cap for sign in (1, -1))
    moved = cap * (high.tanh() - low.tanh()) / (2 * SCORE_EPS)
    # and two roundings of the capped score itself
    return torch.minimum(sizes, moved + 2 * (cap * (scores / cap).tanh()).abs())


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
    for ordered in (tiles, tiles.flip(-1)):
        sums = ordered.cumsum(-1)
        if sink is not None:
            sums += sink[..., None]
        loss = torch.minimum(ordered, eps / 2 * sums)
        lost = lost.maximum(loss.masked_fill(ordered > SMALL * eps * sums, 0.0).sum(-1))
    return lost


def judge_rows(
    candidate: Tensor,
    exact: Tensor,
    same_dtype: Tensor,
    dtype: torch.dtype,
    magnitude: Tensor | None = None,
    lost_in_sums: Tensor | None = None,
    moved_by_scores: Tensor | None = None,
    value_range: Tensor | None = None,
    *,
    weight_error: float = 0.0,
) -> Verdict:
    """Return the errors of the candidate's rows relative to their budgets.

    Args:
        candidate: [rows, ...] the result to judge.
        exact, same_dtype, dtype, magnitude: as in `row_budgets`.
        lost_in_sums, moved_by_scores, weight_error: as in `row_budgets`.
        value_range: as in `allowed_range`.
    """
    if not candidate.numel():
        return Verdict(0.0, 0, 0.0, 0.0, True)
    budgets = row_budgets(
        exact, same_dtype, dtype, magnitude, lost_in_sums, moved_by_scores,
        weight_error=weight_error,
    )  # fmt: skip
    rows = _rows(candidate)
    bad = ~torch.isfinite(rows).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        return Verdict(float("inf"), row, float("inf"), float(budgets[row]), False)
    low, high = allowed_range(
        exact, budgets, dtype, value_range, magnitude, lost_in_sums,
        weight_error=weight_error,
    )  # fmt: skip
    exact = _rows(exact)
    errors = (rows - exact).abs()
    allowed = torch.where(rows > exact, high - exact, exact - low)
    # the budget of a row of zeros is 0: it must be equal
    shares = torch.where(errors == 0, 0.0, errors / allowed)
    row, element = divmod(int(shares.argmax()), shares.shape[1])
    return Verdict(
        float(shares[row, element]),
        row,
        float(errors[row, element]),
        float(allowed[row, element]),
        True,
    )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1).to(torch.float64)
