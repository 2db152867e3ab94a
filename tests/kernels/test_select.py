"""The selection of keys in long rows, with equal scores, both zeros, NaN and infinities."""

from collections.abc import Callable

import pytest
import torch
from support.twins import Twin
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def with_holes(scores: Tensor) -> Tensor:
    scores[:, scores.shape[1] // 3 :] = -INF
    scores[:, 1::7], scores[:, 2::9], scores[:, 3::9] = NAN, -0.0, 0.0
    return scores


def alike(scores: Tensor) -> Tensor:
    scores = torch.full_like(scores, 2.5)
    scores[:, ::3] = INF
    return scores


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "of any size": lambda scores: scores,
    "whole numbers": torch.round,
    "holes and both zeros": with_holes,
    "all alike": alike,
    "negative": lambda scores: -scores.abs() * 1e30,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "width", "topk"),
    [(3, 5000, 2048), (2, 20000, 2048), (2, 17, 30), (1, 16384, 1), (2, 9000, 8999)],
)
def test_the_selected_keys_are_those_of_the_reference(
    tokens: int, width: int, topk: int, kind: str, reference: Twin, device: torch.device
) -> None:
    torch.manual_seed(width)
    scores = KINDS[kind](torch.randn(tokens, width)).to(device)
    found = Twin("optimized", enforce=False).select_keys(scores, topk)
    assert torch.equal(found, reference.select_keys(scores, topk))


def test_rows_with_gaps_are_read_where_they_are(
    reference: Twin, device: torch.device
) -> None:
    scores = torch.full((3, 70), INF, device=device)
    for view in (scores[:, 3:50], scores[:, ::2], scores[::2, :9]):
        view.copy_(torch.randn(view.shape))
        found = Twin("optimized", enforce=False).select_keys(view, 20)
        assert torch.equal(found, reference.select_keys(view, 20))
