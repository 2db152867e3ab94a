"""Partial results join into the whole, whatever the parts."""

import math
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.budgets import ROUNDINGS_INSIDE, judge_rows
from torch import Tensor

INF = float("inf")


def assert_same_lse(found: Tensor, exact: Tensor, size: Tensor) -> None:
    """Assert that log-sum-exps differ by a few roundings of what went into them.

    Args:
        found, exact: of any shape; infinite in the same places.
        size: the largest log-sum-exp that went into each, or something larger.
    """
    empty = exact == -INF
    assert torch.equal(found.cpu() == -INF, empty)
    error = (found.cpu().double() - exact).masked_fill(empty, 0.0).abs()
    # base and base change round each part once or twice, the sum of exponentials rounds at 1
    budget = ROUNDINGS_INSIDE * torch.finfo(found.dtype).eps * (1 + size)
    assert bool((error <= budget).all()), (error / budget).max()


def in_plain_torch(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return parts [parts, ..., size] joined by natural log-sum-exps [parts, ...]."""
    joint = lses.logsumexp(0)
    weights = torch.exp(lses - joint.masked_fill(joint == -INF, 0.0))
    kept = outputs.masked_fill((lses == -INF)[..., None], 0.0)
    return (weights[..., None] * kept).sum(0), joint


def state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over scores [heads, tokens, keys] and values [keys, heads, size]."""
    lse = (
        scores.logsumexp(2)
        if scores.shape[2]
        else scores.new_full(scores.shape[:2], -INF)
    )
    weights = torch.exp(scores - lse[:, :, None])
    out = torch.einsum("htk,khd->thd", weights, values)
    return out.nan_to_num(0.0), lse


@given(
    cut=st.integers(0, 9),
    tokens=st.integers(0, 19),
    head_size=st.sampled_from((1, 5, 16, 80)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    seed=st.integers(0, 99),
)
def test_two_parts_join_into_the_whole(
    cut: int,
    tokens: int,
    head_size: int,
    dtype: torch.dtype,
    seed: int,
    twin: Twin,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(3, tokens, 9, generator=generator).double()
    values = torch.randn(9, 3, head_size, generator=generator).double()
    whole, _ = state(scores, values)
    parts = [state(scores[:, :, s], values[s]) for s in (slice(0, cut), slice(cut, 9))]
    given_parts = []
    for out, lse in parts:
        # an empty part's output is never read
        out = out.masked_fill((lse == -INF).T[:, :, None], float("nan"))
        given_parts += [out.to(dtype).to(device), lse.float().to(device)]
    output = torch.full(
        (tokens, 3, head_size), float("nan"), dtype=dtype, device=device
    )
    lse = torch.full((3, tokens), float("nan"), device=device)
    result = twin.merge_attn_states(*given_parts, output=output, output_lse=lse)
    assert result is output
    outs = torch.stack([given_parts[0], given_parts[2]]).cpu()
    lses = torch.stack([given_parts[1].T, given_parts[3].T]).cpu()
    exact, exact_lse = in_plain_torch(outs.double(), lses.double())
    same = in_plain_torch(outs, lses)[0].to(dtype)
    sizes, _ = in_plain_torch(outs.double().abs(), lses.double())
    assert judge_rows(output.cpu(), exact, same, dtype, sizes).ok
    assert_same_lse(lse, exact_lse.T, lses.masked_fill(lses == -INF, 0).abs().amax(0).T)
    # the parts are the whole's, but for the rounding of each
    whole_of_rounded, _ = in_plain_torch(
        torch.stack([out for out, _ in parts]), torch.stack([lse.T for _, lse in parts])
    )
    assert torch.allclose(whole_of_rounded, whole, rtol=1e-11, atol=1e-12)


@given(parts=st.integers(1, 5), base_e=st.booleans(), seed=st.integers(0, 99))
def test_any_number_of_parts_joins_as_two_by_two(
    parts: int, base_e: bool, seed: int, twin: Twin, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(parts, 4, 2, 6, generator=generator)
    lses = 5 * torch.randn(parts, 4, 2, generator=generator)
    empty = torch.rand(parts, 4, 2, generator=generator) < 0.3
    marks = torch.tensor([INF, -INF, float("nan")])
    lses[empty] = marks[torch.randint(3, (int(empty.sum()),), generator=generator)]
    outputs[empty] = float("nan")
    output, lse = twin.lse_weighted_combine(
        outputs.to(device), lses.to(device), is_lse_base_on_e=base_e
    )
    unit = 1.0 if base_e else math.log(2)
    natural = lses.double().masked_fill(~lses.isfinite(), -INF) * unit
    # two by two, in float64
    total, joint = outputs[0].double().masked_fill(empty[0][..., None], 0.0), natural[0]
    for one, weight in zip(outputs[1:].double(), natural[1:], strict=True):
        total, joint = in_plain_torch(
            torch.stack([total, one]), torch.stack([joint, weight])
        )
    same, _ = in_plain_torch(outputs, natural.float())
    sizes, _ = in_plain_torch(outputs.double().abs(), natural)
    verdict = judge_rows(output.cpu(), total, same, torch.float32, sizes)
    assert verdict.ok, verdict
    size = lses.masked_fill(~lses.isfinite(), 0.0).abs().amax(0)
    assert_same_lse(lse, joint / unit, size)


@pytest.mark.parametrize("base", [math.e, 2.0])
def test_logarithms_to_base_2_join_as_natural_ones_do(
    base: float, twin: Twin, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(2, 5, 3, 8, generator=generator)
    lses = 5 * torch.randn(2, 3, 5, generator=generator)
    lses[0, 0, 0], lses[1, 1, 1] = INF, -INF
    lses[:, 2, 2] = -INF
    lse = torch.full((3, 5), float("nan"), device=device)
    out = twin.merge_attn_states(
        outputs[0].to(device),
        lses[0].to(device),
        outputs[1].to(device),
        lses[1].to(device),
        output_lse=lse,
        prefix_lse_base=base,
        suffix_lse_base=base,
    )
    finite = lses.masked_fill(lses == INF, -INF).transpose(1, 2)
    natural = finite.double() * math.log(base)
    exact, exact_lse = in_plain_torch(outputs.double(), natural)
    same, _ = in_plain_torch(outputs, natural.float())
    sizes, _ = in_plain_torch(outputs.double().abs(), natural)
    assert judge_rows(out.cpu(), exact, same, torch.float32, sizes).ok
    size = finite.masked_fill(finite == -INF, 0.0).abs().amax(0)
    assert_same_lse(lse.T, exact_lse / math.log(base), size)


def test_a_base_is_left_for_the_other_by_one_rounding(
    twin: Twin, device: torch.device
) -> None:
    """And states of two bases join, once both are of one."""
    lse = torch.tensor([[0.0, 1.0, -7.25], [INF, -INF, 3.0e4]], device=device)
    for dtype in (torch.float32, torch.float64):
        natural = twin.log2_lse_to_ln(lse.to(dtype))
        exact = lse.cpu().double() * math.log(2)
        assert natural.dtype == dtype and lse[0, 1] == 1.0
        assert torch.equal(natural.cpu().isinf(), exact.isinf())
        error = (natural.cpu().double() - exact).nan_to_num(0.0).abs()
        rounding = torch.finfo(dtype).eps * exact.abs().nan_to_num(posinf=0.0)
        assert bool((error <= rounding).all())
    one = torch.ones(1, 1, 4, device=device)
    out = twin.merge_attn_states(
        one,
        twin.log2_lse_to_ln(torch.ones(1, 1, device=device)),  # weight 2
        torch.zeros_like(one),
        torch.zeros(1, 1, device=device),  # weight 1
    )
    two_thirds = torch.full((1, 1, 4), 2 / 3, dtype=torch.float64)
    assert judge_rows(out.cpu(), two_thirds, two_thirds.float(), torch.float32).ok


@pytest.mark.parametrize("level", [0.0, -9e4])
@pytest.mark.parametrize("mark", [INF, -INF])
@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_an_empty_part_leaves_the_other_as_it_is(
    level: float, mark: float, side: str, twin: Twin, device: torch.device
) -> None:
    """Some kernels write +inf where a query saw nothing; its output may be anything.

    All the weight is one part's, however large its log-sum-exp, so its bits do not change.
    """
    kept = torch.randn(17, 2, 24, device=device)
    kept_lse = level + 5 * torch.randn(2, 17, device=device)
    nothing = torch.full_like(kept, float("nan"))
    parts = [(nothing, torch.full_like(kept_lse, mark)), (kept, kept_lse)]
    if side == "suffix":
        parts.reverse()
    joint = torch.full_like(kept_lse, float("nan"))
    out = twin.merge_attn_states(*parts[0], *parts[1], output_lse=joint)
    assert torch.equal(out, kept)
    assert_same_lse(joint, kept_lse.cpu().double(), kept_lse.cpu().abs())
    for is_base_e in (True, False):
        alone, its_lse = twin.lse_weighted_combine(
            kept[None], kept_lse.T[None], is_lse_base_on_e=is_base_e
        )
        assert torch.equal(alone, kept)
        assert_same_lse(its_lse, kept_lse.T.cpu().double(), kept_lse.T.cpu().abs())


def test_two_empty_parts_give_zero_and_minus_infinity(
    twin: Twin, device: torch.device
) -> None:
    """vLLM's kernel once returned NaN for them."""
    nothing = torch.full((2, 1, 4), float("nan"), device=device)
    lse = torch.full((1, 2), -INF, device=device)
    joint = torch.zeros(1, 2, device=device)
    out = twin.merge_attn_states(nothing, lse, nothing, lse, output_lse=joint)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(joint, lse)


def test_tokens_without_a_prefix_take_the_suffix(
    twin: Twin, device: torch.device
) -> None:
    prefix = torch.ones(3, 1, 4, device=device)
    suffix = torch.zeros(3, 1, 4, device=device)
    lse = torch.zeros(1, 3, device=device)
    out = twin.merge_attn_states(prefix, lse, suffix, lse, 2)
    assert out[:, 0, 0].tolist() == [0.5, 0.5, 0.0]


def test_parts_may_be_views_with_strides_of_their_own(
    twin: Twin, device: torch.device
) -> None:
    """Both inputs were once read with the strides of the first."""
    wide = torch.randn(5, 3, 12, device=device)
    prefix, suffix = wide[:, :, :4], torch.randn(3, 5, 4, device=device).transpose(0, 1)
    lses = torch.randn(5, 3, device=device).T, torch.randn(3, 5, device=device)
    apart = twin.merge_attn_states(prefix, lses[0], suffix, lses[1])
    packed = twin.merge_attn_states(
        prefix.contiguous(), lses[0].contiguous(), suffix.contiguous(), lses[1]
    )
    assert torch.equal(apart, packed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"suffix_output": torch.zeros(2, 1, 5)}, "suffix_output has shape [2, 1, 5]"),
        (
            {"prefix_lse": torch.zeros(2, 1)},
            "prefix_lse has shape [2, 1]: expected [1, 2]",
        ),
        (
            {"suffix_output": torch.zeros(2, 1, 4).half()},
            "suffix_output is torch.float16",
        ),
        ({"prefill_tokens_with_context": 3}, "= 3: expected 0 to 2"),
        (
            {"suffix_lse_base": 2.0},
            f"prefix_lse_base = {math.e} but suffix_lse_base = 2.0: expected the same;"
            " log2_lse_to_ln turns",
        ),
        (
            {"prefix_lse_base": 10.0, "suffix_lse_base": 10.0},
            "prefix_lse_base = 10.0: expected math.e or 2",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused(
    changes: dict[str, Any], words: str, twin: Twin
) -> None:
    fits = {
        "prefix_output": torch.zeros(2, 1, 4),
        "prefix_lse": torch.zeros(1, 2),
        "suffix_output": torch.zeros(2, 1, 4),
        "suffix_lse": torch.zeros(1, 2),
    }
    with pytest.raises((ValueError, TypeError)) as caught:
        twin.raw.merge_attn_states(**(fits | changes))
    assert words in str(caught.value)


def test_a_log_sum_exp_of_few_bits_is_refused(twin: Twin) -> None:
    with pytest.raises(
        TypeError, match=r"lse is torch.float16: expected torch.float32"
    ):
        twin.raw.log2_lse_to_ln(torch.zeros(2, 3).half())
