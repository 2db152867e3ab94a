"""Masks and biases of transformers: what the integration reads from them."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from pagetwin.integrations.transformers.masks import (
    VisibleRange,
    read_bidirectional_window,
    read_padded_ranges,
    read_position_bias,
)


def mask_of(*rows: str) -> Tensor:
    """Return a mask of one request; a query attends to the keys with a 1."""
    return torch.tensor([[[[each == "1" for each in row] for row in rows]]])


@pytest.mark.parametrize(
    ("mask", "visible", "queries", "keys"),
    [
        (None, VisibleRange(True), (0, 3), (0, 3)),
        (mask_of("100", "110", "111"), VisibleRange(True), (0, 3), (0, 3)),
        (mask_of("000", "010", "011"), VisibleRange(True), (1, 3), (1, 3)),
        (mask_of("100", "110", "110"), VisibleRange(True), (0, 2), (0, 2)),
        (mask_of("100", "110", "011"), VisibleRange(True, 2), (0, 3), (0, 3)),
        (mask_of("110", "110", "110"), VisibleRange(False), (0, 3), (0, 2)),
        (
            mask_of("110", "110", "110"),
            VisibleRange(False, has_bias=True),
            (0, 2),
            (0, 2),
        ),
        (mask_of("110", "111", "011"), VisibleRange(False, 2), (0, 3), (0, 3)),
        (mask_of("100", "110", "001"), VisibleRange(True, None, 2), (0, 3), (0, 3)),
        (mask_of("000", "000", "000"), VisibleRange(True), (0, 0), (0, 0)),
    ],
)
def test_a_mask_is_converted_to_ranges(
    mask: Tensor | None,
    visible: VisibleRange,
    queries: tuple[int, int],
    keys: tuple[int, int],
) -> None:
    ranges = read_padded_ranges(mask, 1, 3, 3, visible)
    assert (ranges.queries, ranges.keys) == ([queries], [keys])


@pytest.mark.parametrize(
    ("mask", "visible", "words"),
    [
        (mask_of("100", "110", "101"), VisibleRange(True), r"\[0, 0, 2, 1\] = False"),
        (mask_of("110", "110", "111"), VisibleRange(True), r"\[0, 0, 0, 1\] = True"),
        (mask_of("100", "110", "111"), VisibleRange(True, 2), r"\[0, 0, 2, 0\] = True"),
        (mask_of("100", "010", "011"), VisibleRange(True), r"\[0, 0, 1, 0\] = False"),
        (mask_of("101", "101", "101"), VisibleRange(False), r"\[0, 0, 0, 1\] = False"),
    ],
)
def test_a_mask_that_contains_more_raises(
    mask: Tensor, visible: VisibleRange, words: str
) -> None:
    with pytest.raises(NotImplementedError, match=words):
        read_padded_ranges(mask, 1, 3, 3, visible)


def test_the_mask_shows_whether_a_bidirectional_window_includes_its_end() -> None:
    mask = mask_of("1100", "1110", "0111", "0011")
    assert read_bidirectional_window(mask, 2) == 2
    assert read_bidirectional_window(mask, 1) == 2
    assert read_bidirectional_window(mask, 9) == 9


def test_a_bias_by_distance_becomes_a_table() -> None:
    """Of five keys and two queries, the last ones."""
    table = torch.randn(3, 9)
    distance = torch.arange(5)[None, :] - torch.arange(3, 5)[:, None]
    bias = table[:, distance + 4][None]
    found = read_position_bias(bias)
    assert found is not None
    assert torch.equal(found[:, distance + 4], bias[0])
    assert read_position_bias(torch.zeros(1, 3, 2, 5)) is None
    bias = bias.clone()
    bias[0, 1, 0, 2] += 1
    with pytest.raises(NotImplementedError, match="by key - query alone"):
        read_position_bias(bias)
