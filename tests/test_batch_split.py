"""Do the decodes come first, in the fewest swaps, and where do they end?"""

from itertools import permutations

import pytest
import torch
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
    measure = next((count for count in counts if count), 0)
    num_decodes = 0
    while num_decodes < len(counts):
        count = counts[num_decodes]
        if count > threshold or (uniform and count not in (measure, 0)):
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


requests = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 2, 3, 9]),  # new tokens
        st.sampled_from([0, 0, 4, 9]),  # computed
        st.sampled_from([1, 4, 9, 12]),  # prompt
    ),
    max_size=9,
)


def region(
    new: int, computed: int, prompt: int | None, threshold: int
) -> tuple[int, ...]:
    """Return a request's place in the order of regions, spelled out."""
    if prompt is None:
        decode, extend = new <= threshold, new > threshold and computed > 0
        return (0,) if decode else (1,) if extend else (2,)
    if computed == 0:
        return (3,)
    if new > threshold:
        return (2,)
    return (1,) if computed < prompt else (0,)


@given(batch=requests, threshold=thresholds, with_prompts=st.booleans())
def test_three_and_four_regions_stand_in_order_and_few_requests_move(
    batch: list[tuple[int, int, int]], threshold: int, with_prompts: bool, twin: Twin
) -> None:
    """A request that stands in its region stays; the others keep their order within it."""
    news, computed, prompts = ([each[i] for each in batch] for i in range(3))
    order = twin.reorder_batch_to_split_decodes_and_prefills(
        news, threshold, computed, prompts if with_prompts else None
    )
    regions = [
        region(new, old, prompt if with_prompts else None, threshold)
        for new, old, prompt in batch
    ]
    assert sorted(order) == list(range(len(batch)))
    assert [regions[req] for req in order] == sorted(regions)
    moved = [(place, req) for place, req in enumerate(order) if place != req]
    assert {req for _, req in moved} == {
        place for place, each in enumerate(sorted(regions)) if regions[place] != each
    }
    for each in set(regions):
        arrivals = [req for _, req in moved if regions[req] == each]
        assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("seed", range(3))
def test_both_twins_choose_the_same_order_of_a_large_batch(
    seed: int, twin: Twin, reference: Twin
) -> None:
    """numpy sorts short arrays in place, and long ones stably only if told to."""
    drawn = torch.randint(0, 4, (3, 300), generator=torch.manual_seed(seed)).tolist()
    for given_counts in (drawn[1:1], drawn[1:2], drawn[1:]):
        orders = [
            each.reorder_batch_to_split_decodes_and_prefills(drawn[0], 1, *given_counts)
            for each in (twin, reference)
        ]
        assert orders[0] == orders[1]


def test_a_short_prompt_is_a_prefill_only_with_four_regions(twin: Twin) -> None:
    news, computed, prompts = [1, 1], [0, 5], [1, 5]
    order = twin.reorder_batch_to_split_decodes_and_prefills
    assert order(news, 1, computed) == [0, 1]
    assert order(news, 1, computed, prompts) == [1, 0]


def test_counts_of_other_lengths_are_refused(twin: Twin) -> None:
    order = twin.raw.reorder_batch_to_split_decodes_and_prefills
    with pytest.raises(ValueError, match="num_computed_tokens has 1 entries: expected"):
        order([1, 1], 1, [0])
    with pytest.raises(ValueError, match="num_prompt_tokens has 3 entries: expected 2"):
        order([1, 1], 1, [0, 0], [1, 1, 1])
    with pytest.raises(ValueError, match="num_computed_tokens = None: expected one"):
        order([1, 1], 1, None, [1, 1])


@given(
    flags=st.lists(st.tuples(st.sampled_from([0, 1, 1, 4]), st.booleans()), max_size=6)
)
def test_a_short_extend_may_count_as_a_prefill(
    flags: list[tuple[int, bool]], twin: Twin
) -> None:
    lens = [new for new, _ in flags]
    step = twin.build_common_attn_metadata(lens, [9] * len(lens), [[0]] * len(lens), 16)
    step = step.replace(is_prefilling=torch.tensor([p for _, p in flags]).bool())
    split = twin.split_decodes_and_prefills(step, treat_short_extends_as_decodes=False)
    decodes = 0
    while decodes < len(flags) and lens[decodes] <= 1 and not flags[decodes][1]:
        decodes += 1
    assert split == (
        decodes,
        len(lens) - decodes,
        sum(lens[:decodes]),
        sum(lens[decodes:]),
    )


def test_short_extends_cannot_be_told_without_is_prefilling(twin: Twin) -> None:
    step = twin.build_common_attn_metadata([1], [4], [[0]], 16)
    with pytest.raises(ValueError, match="is_prefilling = None: expected one bool"):
        twin.split_decodes_and_prefills(step, treat_short_extends_as_decodes=False)


def test_padding_behind_decodes_is_no_prefill(twin: Twin) -> None:
    """Tokens behind the last request once made a prefill's tokens without a prefill."""
    step = twin.build_common_attn_metadata([1, 1], [4, 4], [[0], [1]], 16)
    step = step.replace(num_actual_tokens=4)
    assert twin.split_decodes_and_prefills(step) == (2, 0, 4, 0)
    assert twin.split_decodes_prefills_and_extends(step) == (2, 0, 0, 4, 0, 0)


@given(batch=requests, threshold=thresholds)
def test_three_regions_in_order_are_found_again(
    batch: list[tuple[int, int, int]], threshold: int, twin: Twin
) -> None:
    news, computed = ([each[i] for each in batch] for i in range(2))
    order = twin.reorder_batch_to_split_decodes_and_prefills(news, threshold, computed)
    lens = [news[req] for req in order]
    regions = [region(news[req], computed[req], None, threshold)[0] for req in order]
    step = twin.build_common_attn_metadata(
        lens, [computed[req] for req in order], [[0, 1]] * len(lens), 16
    )
    split = twin.split_decodes_prefills_and_extends(step, threshold)
    tokens = [
        sum(new for new, own in zip(lens, regions, strict=True) if own == each)
        for each in range(3)
    ]
    assert split == (*(regions.count(each) for each in range(3)), *tokens)
    assert all(type(each) is int for each in split)


@given(
    seq_lens=st.lists(st.integers(0, 9), max_size=9),
    size=st.integers(9, 14),
    offset=st.sampled_from([0, 7]),
)
def test_every_run_fits_and_could_take_no_more(
    seq_lens: list[int], size: int, offset: int, twin: Twin
) -> None:
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    runs = twin.split_prefill_chunks(lens, size, offset)
    covered = [req for first, last in runs for req in range(first, last)]
    assert covered == [offset + req for req in range(len(seq_lens))]
    for first, last in runs:
        assert type(first) is int and type(last) is int
        assert sum(seq_lens[first - offset : last - offset]) <= size
        if last - offset < len(seq_lens):
            assert sum(seq_lens[first - offset : last - offset + 1]) > size


def test_a_sequence_larger_than_the_workspace_is_refused(twin: Twin) -> None:
    lens = torch.tensor([3, 11], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"seq_lens\[1\] = 11: expected 0 to workspace"
    ):
        twin.split_prefill_chunks(lens, 10)


def test_a_negative_threshold_is_refused(twin: Twin) -> None:
    step = twin.build_common_attn_metadata([1], [0], [[0]], 16)
    with pytest.raises(ValueError, match="decode_threshold = -1: expected at least 0"):
        twin.split_decodes_and_prefills(step, -1)
    with pytest.raises(ValueError, match="decode_threshold = -1: expected at least 0"):
        twin.reorder_batch_to_split_decodes_and_prefills([1], -1)
