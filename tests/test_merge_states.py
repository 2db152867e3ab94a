"""Partial results join into the whole, whatever the parts."""

from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.shared.budgets import judge_rows
from torch import Tensor

INF = float("inf")


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
    whole, whole_lse = state(scores, values)
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
    rounded = sum(out.to(dtype).double().abs() for out, _ in parts)
    loose = whole + rounded * torch.finfo(dtype).eps
    assert judge_rows(output.cpu(), whole, loose, dtype).ok
    assert torch.allclose(lse.cpu().double(), whole_lse, rtol=1e-5, atol=1e-5)


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
    natural = lses.double() if base_e else lses.double() * torch.log(torch.tensor(2.0))
    joint = torch.full((4, 2), -INF, dtype=torch.float64)
    total = torch.zeros(4, 2, 6, dtype=torch.float64)
    for one, weight in zip(outputs.double(), natural, strict=True):
        for token in range(4):
            for head in range(2):
                if torch.isfinite(weight[token, head]):
                    new = torch.logaddexp(joint[token, head], weight[token, head])
                    total[token, head] *= torch.exp(joint[token, head] - new)
                    total[token, head] += one[token, head] * torch.exp(
                        weight[token, head] - new
                    )
                    joint[token, head] = new
    assert torch.allclose(output.cpu().double(), total, rtol=1e-5, atol=1e-5)
    in_base = joint if base_e else joint / torch.log(torch.tensor(2.0))
    assert torch.allclose(lse.cpu().double(), in_base, rtol=1e-5, atol=1e-5)


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
