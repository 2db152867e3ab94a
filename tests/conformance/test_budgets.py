"""Does the judge pass what is right and reject what is wrong?"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.budgets import (
    FACTOR,
    SCORE_EPS,
    Verdict,
    allowed_range,
    judge_rows,
    lost_in_sums,
    moved_by_scores,
    row_budgets,
)
from torch import Tensor

pytestmark = pytest.mark.quick

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rows_of(seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Return exact rows, and what a sloppy run of a narrow dtype makes of them."""
    exact = torch.randn(rows, 3, 5, generator=torch.Generator().manual_seed(seed))
    return exact.double(), exact.double() + 1e-3


@given(seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_the_truth_rounded_once_is_right(seed: int, dtype: torch.dtype) -> None:
    exact, _ = rows_of(seed)
    verdict = judge_rows(exact.to(dtype), exact, exact, dtype)
    assert verdict.ok and verdict.worst <= 0.5 and verdict.finite


@given(seed=st.integers(0, 99), share=st.floats(0, 3))
def test_a_row_may_lose_twice_what_plain_torch_loses(seed: int, share: float) -> None:
    exact, same = rows_of(seed)
    budgets = row_budgets(exact, same, torch.float16)
    candidate = exact.clone()
    candidate[2, 1, 3] += share * budgets[2]
    verdict = judge_rows(candidate, exact, same, torch.float16)
    assert verdict.worst == pytest.approx(share, abs=1e-6)
    assert verdict.ok == (verdict.worst <= 1)
    assert budgets.min() >= FACTOR * 1e-3 * 0.999


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_is_wrong(bad: float) -> None:
    exact, same = rows_of(0)
    candidate = exact.clone()
    candidate[3, 0, 0] = bad
    verdict = judge_rows(candidate, exact, same, torch.float16)
    assert not verdict.ok and verdict.row == 3
    assert str(verdict) == "row 3 contains NaN or infinity"


def test_a_row_of_zeros_must_be_met_exactly() -> None:
    """A padding row has no rounding, so any old memory in it is an error."""
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    assert judge_rows(zeros, zeros, zeros, torch.float16).ok
    candidate = zeros.clone()
    candidate[1, 2] = 1e-30
    assert not judge_rows(candidate, zeros, zeros, torch.float16).ok


def test_one_wrong_row_is_not_forgiven_for_the_others() -> None:
    """A budget for the whole tensor lets a small row drown beside a large one."""
    exact = torch.ones(9, 4, dtype=torch.float64)
    exact[0] *= 1e4
    same = exact * (1 + 1e-4)
    candidate = exact.clone()
    candidate[1] += 0.5
    verdict = judge_rows(candidate, exact, same, torch.float32)
    assert not verdict.ok and verdict.row == 1
    assert (candidate - exact).abs().max() < 2 * (same - exact).abs().max()


def test_nothing_is_right() -> None:
    nothing = torch.empty(0, 4)
    assert judge_rows(nothing, nothing.double(), nothing, torch.float32).ok


def test_a_verdict_says_which_row_and_how_much() -> None:
    exact = torch.ones(2, 1, dtype=torch.float64)
    verdict = judge_rows(exact + 1, exact, exact + 0.25, torch.float32)
    assert verdict.worst == pytest.approx(2.0, rel=1e-3)
    assert str(verdict) == "row 0: error 1, budget 0.5 (2.00 of it)"


def budget_of(scores: Tensor, values: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arguments of `judge_rows` for one row over keys, in float64."""
    weights, errors = scores.softmax(0)[None, None], SCORE_EPS * scores.abs()
    exact = weights[0] @ values
    average = weights @ values.abs()[None]
    moved = moved_by_scores(weights, errors[None, None], values.abs()[None], average)
    return {
        "exact": exact,
        "same_dtype": exact.to(dtype),
        "magnitude": average[0],
        "moved_by_scores": moved[0],
        "value_range": torch.stack([values.amin(0), values.amax(0)])[:, None],
    }


LEVELS = [sign * 10.0**exponent for exponent in range(2, 9) for sign in (1, -1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_do_not_sum_to_one_are_wrong_at_every_score(
    level: float, dtype: torch.dtype
) -> None:
    """Beside a rounded log-sum-exp of 1e8 six equal keys have the weight 1 each."""
    scores = torch.full((6,), level, dtype=torch.float64)
    ones = torch.ones(6, 4, dtype=torch.float64)
    budget = budget_of(scores, ones, dtype)
    for found, is_right in ((1.0, True), (6.0, False), (0.98, False), (1.02, False)):
        out = torch.full((1, 4), found).to(dtype)
        assert judge_rows(out, dtype=dtype, **budget).ok == is_right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [score for score in LEVELS if score > 0])
def test_a_needle_must_be_met_at_every_score(level: float, dtype: torch.dtype) -> None:
    """Its value is between those of the other keys, so only its weight tells that it is lost."""
    scores = torch.tensor([level, level / 2, level / 2, -level], dtype=torch.float64)
    values = torch.tensor([[0.25], [2.0], [-2.0], [9.0]], dtype=torch.float64)
    budget = budget_of(scores, values, dtype)
    for found, is_right in ((0.25, True), (0.0, False), (2.0, False), (9.0, False)):
        out = torch.tensor([[found]]).to(dtype)
        assert judge_rows(out, dtype=dtype, **budget).ok == is_right


def test_the_ratio_of_weights_is_known_as_exactly_as_the_scores() -> None:
    """A rounding of 2**20 is 1 / 8. If one score gains it and the other loses it, the weights are
    0.56 and 0.44; the bound is 0.5755."""
    values = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for level, reach in ((2.0**10, 6.3e-5), (2.0**20, 0.0756), (2.0**27, 0.5)):
        scores = torch.tensor([level, level], dtype=torch.float64)
        budget = budget_of(scores, values, torch.float32)
        for side in (-1, 1):
            for part, is_right in ((0.95, True), (1.05, False)):
                found = torch.tensor([[0.5 + side * part * reach]])
                verdict = judge_rows(found, dtype=torch.float32, **budget)
                assert verdict.ok == is_right, (level, part, verdict)


def test_a_row_whose_run_in_its_own_dtype_overflows_counts_as_exact() -> None:
    """Scores of 1e8 are infinite in float16, but not in the kernel."""
    exact = torch.ones(4, 2, dtype=torch.float64)
    same = exact.half()
    same[1], same[2] = torch.nan, torch.inf
    assert judge_rows(exact.half(), exact, same, torch.float16).ok
    wrong = exact.half()
    wrong[1] += 0.1
    verdict = judge_rows(wrong, exact, same, torch.float16)
    assert verdict.row == 1 and not verdict.ok


def test_an_element_may_leave_the_range_of_its_values_by_a_rounding_only() -> None:
    exact = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    budgets = torch.tensor([0.5], dtype=torch.float64)
    values = torch.tensor([[[1.0, -3.0]], [[1.0, 0.1]]], dtype=torch.float64)
    low, high = allowed_range(exact, budgets, torch.float32, values)
    eps = 8 * 3 * torch.finfo(torch.float32).eps
    assert low.tolist() == [[pytest.approx(1 - eps, abs=1e-12), -0.5]]
    assert high.tolist() == [[pytest.approx(number + eps) for number in (1.0, 0.1)]]


def test_weights_in_fp8_may_leave_the_range_by_their_own_rounding() -> None:
    exact = torch.ones(1, 1, dtype=torch.float64)
    values = torch.ones(2, 1, 1, dtype=torch.float64)
    found = torch.full((1, 1), 1.05)
    budget = {"dtype": torch.bfloat16, "value_range": values}
    assert not judge_rows(found, exact, exact, **budget).ok
    assert judge_rows(found, exact, exact, **budget, weight_error=2.0**-4).ok


def online_softmax(
    scores: Tensor, values: Tensor, tile: int, backwards: bool
) -> Tensor:
    """Return the weighted average in float32, one tile of keys after the other."""
    acc, l_i = torch.zeros(values.shape[1]), torch.zeros(())
    weights = (scores - scores.max()).exp()
    tiles = [*zip(weights.split(tile), values.split(tile), strict=True)]
    for p, v in tiles[::-1] if backwards else tiles:
        acc = acc + p @ v
        l_i = l_i + p.sum()
    return acc / l_i


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_small_tiles_beside_a_needle_may_be_lost(backwards: bool, mean: float) -> None:
    """A kernel lost 43 tiles of 4.7e-8 beside a needle: 1.46 of the budget without them."""
    generator = torch.Generator().manual_seed(0)
    keys, needle = 684, 683 if backwards else 0
    scores = 0.1 * torch.randn(keys, generator=generator)
    values = mean + torch.randn(keys, 64, generator=generator)
    scores[needle], values[needle] = 19.66, 5.6
    weights = scores.double().softmax(0)
    exact = (weights @ values.double())[None]
    same = (scores.softmax(0) @ values)[None].double()
    magnitude = (weights @ values.double().abs())[None]
    lost = lost_in_sums(weights)[None]
    found = online_softmax(scores, values, 16, backwards)[None]
    without = judge_rows(found, exact, same, torch.float32, magnitude)
    assert without.worst > 1
    its = judge_rows(found, exact, same, torch.float32, magnitude, lost_in_sums=lost)
    assert its.ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_fp8_have_half_of_an_fp8_rounding_each(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(20, 300, generator=generator).exp().double()
    sums = weights.sum(1, keepdim=True)
    values = torch.randn(300, 64, generator=generator).double()
    magnitude = weights / sums @ values.abs()
    exact = weights / sums @ values

    def judge(p: Tensor) -> Verdict:
        found = (p / sums @ values).to(dtype)
        budget = {"magnitude": magnitude, "weight_error": 2.0**-4}
        return judge_rows(found, exact, exact.to(dtype), dtype, **budget)

    rounded = weights.to(torch.float8_e4m3fn).double()
    found = (rounded / sums @ values).to(dtype)
    assert judge_rows(found, exact, exact.to(dtype), dtype, magnitude).worst > 1
    assert judge(rounded).ok
    # all weights too large, and one of them dropped
    assert not judge(rounded * 1.2).ok
    rounded[0, weights[0].argmax()] = 0
    assert judge(rounded).row == 0 and not judge(rounded).ok


def test_nothing_is_lost_if_no_tile_is_small() -> None:
    weights = torch.rand(3, 700, generator=torch.Generator().manual_seed(0)).double()
    weights /= weights.sum(1, keepdim=True)
    assert not lost_in_sums(weights).any()
    assert not lost_in_sums(weights[:, :0]).any()


def test_a_sink_is_part_of_the_sum() -> None:
    weights = torch.full((1, 160), 1e-9, dtype=torch.float64)
    assert not lost_in_sums(weights).any()
    lost = lost_in_sums(weights, torch.ones(1, dtype=torch.float64))
    assert float(lost) == pytest.approx(1.6e-7)


@pytest.mark.parametrize("error", [1e-6, 0.05, 0.5, 3.0])
def test_an_error_of_scores_moves_an_output_by_no_more_than_its_bound(
    error: float,
) -> None:
    """On a GPU products of 90 that cancel to a score of 4 moved a float32 row by 1.13 budgets."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    scores, values = 2 * draw(3, 5, 40), draw(3, 40, 8)
    errors = error * (scores.abs() + 9 * draw(3, 5, 40).abs()) / 10
    weights = scores.softmax(2)
    exact = weights @ values
    moved = moved_by_scores(weights, errors, values.abs(), weights @ values.abs())
    largest = torch.zeros(())
    for key in range(50):
        sign = draw(3, 5, 40).sign()
        if key < 8:  # the worst case of an element: all keys with larger values gain
            sign = (values.mT[:, key, None] - exact[..., key, None]).sign()
        found = (scores + sign * errors).softmax(2) @ values
        share = (found - exact).abs() / moved
        assert float(share.max()) <= 1
        largest = largest.maximum(share.max())
    assert float(largest) > min(0.1, 0.03 / error)


@pytest.mark.parametrize("error", [1e-5, 12.0, 1e30])
def test_a_key_with_all_of_the_weight_moves_nothing(error: float) -> None:
    weights = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64)
    values = torch.tensor([[[3.0], [1.0], [2.0]]], dtype=torch.float64)
    errors = torch.full_like(weights, error)
    moved = moved_by_scores(weights, errors, values, weights @ values)
    assert float(moved) == 0


def test_a_verdict_on_an_exact_result_of_nan_is_a_sentence_without_nan_errors() -> None:
    exact = torch.tensor([[torch.nan, 1.0]], dtype=torch.float64)
    verdict = judge_rows(torch.ones(1, 2), exact, exact.float(), torch.float32)
    assert not verdict.ok
    assert str(verdict) == "row 0: the exact result contains NaN or infinity"


def test_a_row_without_keys_moves_nothing() -> None:
    weights = torch.zeros(1, 2, 3, dtype=torch.float64)
    values = torch.ones(1, 3, 4, dtype=torch.float64)
    moved = moved_by_scores(weights, weights + 1, values, weights @ values)
    assert not moved.any()
