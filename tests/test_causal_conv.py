"""Does every program know the tokens it convolves?"""

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st


@given(lens=st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 40]), max_size=6))
def test_the_programs_cover_every_token_once(
    lens: list[int], twin: Twin, device: torch.device
) -> None:
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    before = starts.clone()
    by_size, request, offset = twin.compute_causal_conv1d_metadata(starts, device)
    assert torch.equal(starts, before)
    covered = []
    for req, place in zip(request.tolist(), offset.tolist(), strict=True):
        assert (req == -1) == (place == -1)
        if req >= 0:
            first = starts[req] + 8 * place
            covered += range(first, min(first + 8, starts[req + 1]))
    assert covered == list(range(sum(lens)))
    chunks = by_size[8]
    assert list(by_size) == [8]
    assert chunks["nums"].tolist() == [-(-each // 8) for each in lens]
    assert chunks["tot"] == chunks["mlist_len"] == sum(chunks["nums"].tolist())
    assert chunks["mlist"].tolist() == request[: chunks["tot"]].tolist()
    assert chunks["offsetlist"].tolist() == offset[: chunks["tot"]].tolist()
    assert [chunks[each].dtype for each in ("nums", "mlist", "offsetlist")] == [
        torch.int32,
        torch.int64,
        torch.int32,
    ]
    assert request.device.type == device.type


def test_the_buffers_grow_when_there_are_more_chunks(twin: Twin) -> None:
    starts = torch.tensor([0, 8 * 1025], dtype=torch.int32)
    _, request, offset = twin.compute_causal_conv1d_metadata(starts)
    assert len(request) == len(offset) == 2 * 1025
    assert request[:1025].tolist() == [0] * 1025 and request[1025] == -1


@pytest.mark.parametrize(
    ("starts", "error", "words"),
    [
        (torch.tensor([0, 4], dtype=torch.int32, device="meta"), ValueError, "on meta"),
        (torch.tensor([0, 4, 2], dtype=torch.int32), ValueError, "never fall"),
        (torch.tensor([1, 4], dtype=torch.int32), ValueError, r"\[0\] = 1: expected 0"),
        (torch.tensor([0, 4]), TypeError, "torch.int64"),
    ],
)
def test_starts_that_cannot_be_are_refused(
    starts: torch.Tensor, error: type[Exception], words: str, twin: Twin
) -> None:
    with pytest.raises(error, match=words):
        twin.raw.compute_causal_conv1d_metadata(starts)
