"""Do the decodes come first, in the fewest swaps, and where do they end?"""

from itertools import permutations

import pytest
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st

counts = st.lists(st.sampled_from([0, 1, 1, 2, 3, 9]), max_size=12)
thresholds = st.sampled_from([0, 1, 1, 3])


@given(counts=counts, threshold=thresholds)
def test_the_order_puts_decodes_first(
    counts: list[int], threshold: int, twin: Twin
) -> None:
    """It is a permutation, and only requests on the wrong side of the boundary move."""
    order = twin.reorder_batch_to_split_decodes_and_prefills(counts, threshold)
    assert sorted(order) == list(range(len(counts)))
    assert all(type(each) is int for each in order)
    decodes = [count <= threshold for count in counts]
    num_decodes = sum(decodes)
    ordered = [decodes[req] for req in order]
    assert ordered == sorted(ordered, reverse=True)
    for place, req in enumerate(order):
        on_its_side = decodes[place] == (place < num_decodes)
        assert (req == place) == on_its_side
    # whatever moves is swapped with its partner: the order is its own inverse
    assert [order[req] for req in order] == list(range(len(counts)))


@given(counts=st.lists(st.sampled_from([1, 4]), max_size=6))
def test_no_other_order_moves_fewer_requests(counts: list[int], twin: Twin) -> None:
    def moved(order: tuple[int, ...]) -> int:
        return sum(place != req for place, req in enumerate(order))

    def sorted_out(order: tuple[int, ...]) -> bool:
        lens = [counts[req] for req in order]
        return lens == sorted(lens)

    every = [order for order in permutations(range(len(counts))) if sorted_out(order)]
    order = tuple(twin.reorder_batch_to_split_decodes_and_prefills(counts))
    assert order in every
    assert moved(order) == min(map(moved, every))


@given(counts=counts, threshold=thresholds)
def test_both_twins_choose_the_same_order(
    counts: list[int], threshold: int, twin: Twin, reference: Twin
) -> None:
    orders = [
        each.reorder_batch_to_split_decodes_and_prefills(counts, threshold)
        for each in (twin, reference)
    ]
    assert orders[0] == orders[1]


@given(counts=counts, threshold=thresholds, uniform=st.booleans())
def test_the_boundary_stands_before_the_first_prefill(
    counts: list[int], threshold: int, uniform: bool, twin: Twin
) -> None:
    step = twin.build_common_attn_metadata(
        counts, [0] * len(counts), [[0]] * len(counts), 16
    )
    num_decodes = 0
    while num_decodes < len(counts):
        count = counts[num_decodes]
        if count > threshold or (uniform and count not in (counts[0], 0)):
            break
        num_decodes += 1
    split = twin.split_decodes_and_prefills(step, threshold, require_uniform=uniform)
    assert split == (
        num_decodes,
        len(counts) - num_decodes,
        sum(counts[:num_decodes]),
        sum(counts[num_decodes:]),
    )
    assert all(type(each) is int for each in split)


@given(counts=counts, threshold=thresholds)
def test_a_batch_in_order_has_all_its_decodes_before_the_boundary(
    counts: list[int], threshold: int, twin: Twin
) -> None:
    order = twin.reorder_batch_to_split_decodes_and_prefills(counts, threshold)
    lens = [counts[req] for req in order]
    step = twin.build_common_attn_metadata(lens, [0] * len(lens), [[0]] * len(lens), 16)
    num_decodes, *_ = twin.split_decodes_and_prefills(step, threshold)
    assert num_decodes == sum(count <= threshold for count in counts)


def test_a_negative_threshold_is_refused(twin: Twin) -> None:
    step = twin.build_common_attn_metadata([1], [0], [[0]], 16)
    with pytest.raises(ValueError, match="decode_threshold = -1: expected at least 0"):
        twin.split_decodes_and_prefills(step, -1)
    with pytest.raises(ValueError, match="decode_threshold = -1: expected at least 0"):
        twin.reorder_batch_to_split_decodes_and_prefills([1], -1)
