"""How large an error is an error?

A fixed tolerance is no judge: with random data, 1e-2 does not notice a key dropped among 4,096.
So every output row gets a budget of its own, from two runs of plain torch on the same inputs: one
in float64, which is the truth, and one in the candidate's own dtype, which shows what honest
rounding costs this row. A kernel may lose twice that, and a few roundings.

Torch is sometimes lucky in a row. So no row is taken to cost less than three rows in four of the
batch do, unless that is more than one rounding of the values it averages: a large row lends a small
one nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
ROUNDS_ONCE = (torch.float16, torch.bfloat16)
"""A 16-bit kernel computes in float32 inside and rounds its result once, at the end."""
ROUNDINGS_INSIDE = 8
"""A float32 kernel rounds inside too, and the exponential of a score of size s turns one rounding
of the score into s of the weight. Chosen by trial: with 4, right kernels exceed the budget by up to
13 % in rows of one or two elements, where torch's own loss is luck; with 8 they use 55 % of it."""


@dataclass(frozen=True)
class Verdict:
    """How a candidate's rows stand against their budgets.

    Args:
        worst: the largest error of a row divided by that row's budget; at most 1 is right.
        row: that row.
        error, budget: of that row, in the unit of the output.
        finite: whether every element is a number.
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
            return f"row {self.row} holds NaN or infinity"
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
) -> Tensor:
    """Return what each row may lose.

    Args:
        exact: [rows, ...] the result in float64.
        same_dtype: [rows, ...] plain torch's result, computed in `dtype`.
        dtype: the candidate's element type.
        magnitude: [rows, ...] the size of what is averaged: the same attention over the absolute
            values. None: the size of the result, which is smaller where values cancel.
        joined_lse: [rows, ...] the log-sum-exp of rows that were joined from parts. Each part's
            was rounded to float32, and a rounding of a logarithm of size s is s roundings of
            the part's weight. None: the rows were computed in one piece.

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
    if dtype in ROUNDS_ONCE:
        return FACTOR * lost + eps * size
    roundings = largest.new_full(largest.shape, ROUNDINGS_INSIDE)
    if joined_lse is not None:
        size = _rows(joined_lse).abs()
        roundings += torch.where(size.isfinite(), size, 0.0).amax(1)
    return FACTOR * lost + roundings * eps * largest


def judge_rows(
    candidate: Tensor,
    exact: Tensor,
    same_dtype: Tensor,
    dtype: torch.dtype,
    magnitude: Tensor | None = None,
    joined_lse: Tensor | None = None,
) -> Verdict:
    """Return how the candidate's rows stand against their budgets.

    Args:
        candidate: [rows, ...] the result in question.
        exact, same_dtype, dtype, magnitude, joined_lse: what `row_budgets` takes.
    """
    if not candidate.numel():
        return Verdict(0.0, 0, 0.0, 0.0, True)
    budgets = row_budgets(exact, same_dtype, dtype, magnitude, joined_lse)
    rows = _rows(candidate)
    bad = ~torch.isfinite(rows).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        return Verdict(float("inf"), row, float("inf"), float(budgets[row]), False)
    errors = (rows - _rows(exact)).abs().amax(1)
    # a row of zeros has no budget and must be met exactly
    shares = torch.where(errors == 0, 0.0, errors / budgets)
    row = int(shares.argmax())
    return Verdict(
        float(shares[row]), row, float(errors[row]), float(budgets[row]), True
    )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1).to(torch.float64)
