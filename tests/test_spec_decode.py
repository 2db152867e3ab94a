"""Are drafted tokens seen by request, without a copy?"""

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st

sizes = st.integers(1, 4)


@given(reqs=sizes, query_len=st.integers(0, 4), heads=sizes, width=sizes)
def test_every_token_stands_where_its_request_says(
    reqs: int, query_len: int, heads: int, width: int, twin: Twin, device: torch.device
) -> None:
    query = torch.rand(reqs * query_len, heads, width, device=device)
    by_request = twin.reshape_query_for_spec_decode(query, reqs)
    assert tuple(by_request.shape) == (reqs, query_len, heads, width)
    for req in range(reqs):
        for place in range(query_len):
            assert torch.equal(by_request[req, place], query[req * query_len + place])
    assert by_request.data_ptr() == query.data_ptr()
    back = twin.reshape_attn_output_for_spec_decode(by_request)
    assert torch.equal(back, query) and back.data_ptr() == query.data_ptr()


def test_a_query_of_any_strides_is_viewed(twin: Twin, device: torch.device) -> None:
    wide = torch.rand(6, 3, 2, 4, device=device)
    query = wide[:, 1]
    by_request = twin.reshape_query_for_spec_decode(query, 3)
    assert by_request.data_ptr() == query.data_ptr()
    back = twin.reshape_attn_output_for_spec_decode(by_request)
    assert torch.equal(back, query) and back.stride() == query.stride()


def test_three_axes_are_taken_as_they_are(twin: Twin, device: torch.device) -> None:
    output = torch.rand(6, 2, 4, device=device)
    assert twin.reshape_attn_output_for_spec_decode(output) is output


@pytest.mark.parametrize(
    ("shape", "batch_size", "words"),
    [
        ((4, 2), 2, r"query has shape \[4, 2\]"),
        ((4, 2, 3), 0, "batch_size = 0: expected at least 1"),
        ((4, 2, 3), 3, "query has 4 tokens for batch_size = 3"),
    ],
)
def test_queries_that_do_not_divide_are_refused(
    shape: tuple[int, ...], batch_size: int, words: str, twin: Twin
) -> None:
    with pytest.raises(ValueError, match=words):
        twin.raw.reshape_query_for_spec_decode(torch.rand(shape), batch_size)


def test_an_output_that_needs_a_copy_is_refused(twin: Twin) -> None:
    with pytest.raises(ValueError, match=r"attn_output has shape \[4, 2\]"):
        twin.raw.reshape_attn_output_for_spec_decode(torch.rand(4, 2))
    turned = torch.rand(3, 2, 2, 4).transpose(0, 1)
    with pytest.raises(ValueError, match=r"call \.contiguous"):
        twin.reshape_attn_output_for_spec_decode(turned)
