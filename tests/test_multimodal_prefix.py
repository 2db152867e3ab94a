"""Do the tokens of an image, and no others, see each other both ways?"""

from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.multimodal_features import MultiModalFeature


@st.composite
def prompts(draw: st.DrawFn) -> list[list[MultiModalFeature]]:
    """Return requests whose features stand one behind the other, with masks or without."""
    batch = []
    for _ in range(draw(st.integers(0, 3))):
        row, offset = [], 0
        for _ in range(draw(st.integers(0, 3))):
            offset += draw(st.integers(0, 3))
            length = draw(st.integers(0, 6))
            flags = st.lists(st.booleans(), min_size=length, max_size=length)
            mask: Any = draw(st.none() | flags)
            if mask is not None and draw(st.booleans()):
                mask = torch.tensor(mask, dtype=torch.bool)
            modality = draw(st.sampled_from(["image", "video", "audio"]))
            row.append(MultiModalFeature(modality, offset, length, mask))
            offset += length
        batch.append(row)
    return batch


def embedded(feature: MultiModalFeature) -> set[int]:
    """Return the positions that a feature's embeddings stand at."""
    mask = [True] * feature.length if feature.is_embed is None else feature.is_embed
    return {feature.offset + place for place, flag in enumerate(mask) if flag}


@given(features=prompts())
def test_the_ranges_cover_every_image_token_and_nothing_else(
    features: list[list[MultiModalFeature]], twin: Twin
) -> None:
    ranges = twin.compute_mm_prefix_ranges(features)
    assert list(ranges) == list(range(len(features)))
    for req, row in enumerate(features):
        expected = []
        for feature in row:
            if feature.modality == "audio":
                continue
            positions = embedded(feature)
            firsts = sorted(p for p in positions if p - 1 not in positions)
            lasts = sorted(p for p in positions if p + 1 not in positions)
            expected += list(zip(firsts, lasts, strict=True))
        assert ranges[req] == expected


@given(features=prompts(), window=st.integers(0, 6), clamp=st.booleans())
def test_a_range_longer_than_the_window_is_left_out(
    features: list[list[MultiModalFeature]], window: int, clamp: bool, twin: Twin
) -> None:
    every = twin.compute_mm_prefix_ranges(features)
    kept = twin.compute_mm_prefix_ranges(features, window, clamp)
    for req, ranges in every.items():
        fitting = [(a, b) for a, b in ranges if clamp or b - a + 1 <= window]
        assert kept[req] == fitting


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_span_begins_behind_its_padding(offset: int, twin: Twin) -> None:
    """With 4: before the first position that is one less than a multiple of 4."""
    marks = [False, True, False, True, True, False, True, True]
    image = MultiModalFeature("image", offset, 8, marks)
    ranges = twin.compute_mm_prefix_ranges([[image]], span_leading_pad_modulus=4)
    assert ranges == {0: [(3, offset + 7)]}
    short = MultiModalFeature("image", offset, 3 - offset)
    assert twin.compute_mm_prefix_ranges([[short]], None, False, 4) == {0: []}


@given(features=prompts(), spare=st.integers(0, 2))
def test_the_tensor_holds_every_range_and_zeros(
    features: list[list[MultiModalFeature]],
    spare: int,
    twin: Twin,
    device: torch.device,
) -> None:
    ranges = twin.compute_mm_prefix_ranges(features)
    num_seqs = len(features) + spare
    tensor = twin.compute_mm_prefix_range_tensor(ranges, num_seqs, device)
    rows = [ranges.get(req, []) for req in range(num_seqs)]
    if tensor is None:
        assert all(row in ([], [(0, 0)]) for row in rows)
        return
    assert tensor.dtype == torch.int32 and tensor.device.type == device.type
    longest = max(map(len, rows))
    assert tensor.tolist() == [
        [*map(list, row), *[[0, 0]] * (longest - len(row))] for row in rows
    ]


def test_no_range_makes_no_tensor(twin: Twin) -> None:
    for ranges in (None, {}, {0: []}, {0: [(0, 0)], 1: []}):
        assert twin.compute_mm_prefix_range_tensor(ranges, 2) is None


@given(features=prompts(), data=st.data())
def test_every_new_token_knows_its_range(
    features: list[list[MultiModalFeature]], data: st.DataObject, twin: Twin
) -> None:
    ranges = twin.compute_mm_prefix_ranges(features)
    seq_lens = [data.draw(st.integers(0, 24)) for _ in features]
    query_lens = [data.draw(st.integers(0, n)) for n in seq_lens]
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    expected = []
    for req, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            own = [(a, b) for a, b in ranges[req] if a <= position <= b and a < b]
            expected.append(list(own[0]) if own else [-1, -1])
    total = len(expected)
    out = torch.full((total + 2, 2), -5, dtype=torch.int32)
    before = {req: list(row) for req, row in ranges.items()}
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    rows = twin.fill_mm_prefix_query_ranges(out, ranges, starts, lens)
    assert ranges == before
    if any(row != [-1, -1] for row in expected):
        assert rows == total
        assert out.tolist() == [*expected, [-5, -5], [-5, -5]]
    else:
        assert rows == 0 and bool((out == -5).all())


def test_what_cannot_be_is_refused(twin: Twin) -> None:
    int32 = torch.int32
    starts, lens = torch.tensor([0, 3], dtype=int32), torch.tensor([7], dtype=int32)
    out = torch.zeros(2, 2, dtype=int32)
    fill = twin.raw.fill_mm_prefix_query_ranges
    assert fill(out, None, starts, lens) == 0
    with pytest.raises(IndexError, match="out has 2 rows: expected at least 3"):
        fill(out, {0: [(5, 9)]}, starts, lens)
    with pytest.raises(IndexError, match="mm_prefix_range has request 1"):
        fill(out, {1: [(5, 9)]}, starts, lens)
    with pytest.raises(IndexError, match="mm_prefix_range has request 2"):
        twin.compute_mm_prefix_range_tensor({2: [(5, 9)]}, 2)
    with pytest.raises(ValueError, match="request 0 has 3 new tokens"):
        fill(out, {0: [(5, 9)]}, starts, lens - 5)
    with pytest.raises(ValueError, match="out lies on meta"):
        fill(torch.zeros(4, 2, dtype=int32, device="meta"), {}, starts, lens)
    with pytest.raises(TypeError, match=r"out is torch\.int64"):
        fill(torch.zeros(4, 2, dtype=torch.int64), {}, starts, lens)
    with pytest.raises(ValueError, match=r"out has shape \[4\]"):
        fill(torch.zeros(4, dtype=int32), {}, starts, lens)
    with pytest.raises(ValueError, match="length = 3 but a mask of 2"):
        twin.compute_mm_prefix_ranges([[MultiModalFeature("image", 0, 3, [True] * 2)]])
    with pytest.raises(ValueError, match="offset = -1"):
        twin.compute_mm_prefix_ranges([[MultiModalFeature("image", -1, 3)]])
    with pytest.raises(ValueError, match="sliding_window = -1"):
        twin.compute_mm_prefix_ranges([], sliding_window=-1)
