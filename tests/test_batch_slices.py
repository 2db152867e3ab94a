"""Is a micro-batch the same as a step of its own requests and tokens?"""

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract import metadata_classes
from pagetwin.contract.metadata_classes import CommonAttentionMetadata, UBatchSlice
from test_metadata import assert_says

BLOCK_SIZE = 4


@st.composite
def cut_steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Return new tokens, computed tokens, and where the flat batch is cut."""
    reqs = draw(st.integers(1, 5))
    lens = [draw(st.sampled_from([1, 1, 2, 3, 7, 10])) for _ in range(reqs)]
    computed = [draw(st.integers(0, 9)) for _ in range(reqs)]
    cuts = draw(st.lists(st.integers(1, sum(lens)), max_size=4, unique=True))
    return lens, computed, sorted({0, *cuts, sum(lens)})


def owners_of(lens: list[int]) -> list[int]:
    return [req for req, new in enumerate(lens) for _ in range(new)]


def slices_of(lens: list[int], cuts: list[int]) -> list[UBatchSlice]:
    owner = owners_of(lens)
    return [
        UBatchSlice(slice(owner[begin], owner[end - 1] + 1), slice(begin, end))
        for begin, end in pairwise(cuts)
    ]


def rows_of(lens: list[int], computed: list[int]) -> list[list[int]]:
    """Return a row of ids of its own for each request."""
    widths = [
        -(-(new + old) // BLOCK_SIZE) for new, old in zip(lens, computed, strict=True)
    ]
    return [[10 * req + i for i in range(width)] for req, width in enumerate(widths)]


def counts(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def encoder_starts(reqs: Iterable[int]) -> torch.Tensor:
    """Return where the tokens of some encoders start; every third request brings none."""
    return counts([0, *accumulate(req % 3 for req in reqs)])


def encoder_slots(reqs: Iterable[int]) -> torch.Tensor:
    slots = [1000 * req + i for req in reqs for i in range(req % 3)]
    return torch.tensor(slots, dtype=torch.int64)


def full_step(
    twin: Twin, lens: list[int], computed: list[int], device: Any = "cpu"
) -> CommonAttentionMetadata:
    """Return a step in which every optional field holds something."""
    step = twin.build_common_attn_metadata(
        lens, computed, rows_of(lens, computed), BLOCK_SIZE, device
    )
    reqs, tokens = len(lens), sum(lens)
    logits = [*range(0, tokens, 2), 99, 99]
    on_device = {
        "encoder_seq_lens": counts([70 + req for req in range(reqs)]),
        "encoder_query_start_loc": encoder_starts(range(reqs)),
        "cross_block_table_tensor": counts([[7 * req] for req in range(reqs)]),
        "cross_slot_mapping": encoder_slots(range(reqs)),
        "positions": torch.tensor(
            [
                old + i
                for new, old in zip(lens, computed, strict=True)
                for i in range(new)
            ]
        ),
    }
    return replace(
        step,
        causal=False,
        logits_indices_padded=torch.tensor(logits, dtype=torch.int32),
        num_logits_indices=len(logits) - 2,
        max_logits_per_req=5,
        encoder_seq_lens_cpu=counts([70 + req for req in range(reqs)]),
        max_encoder_seq_len=99,
        encoder_query_start_loc_cpu=encoder_starts(range(reqs)),
        is_prefilling=torch.tensor([req % 2 == 0 for req in range(reqs)]),
        mm_req_doc_ranges={req: [(req, req + 2)] for req in range(0, reqs, 2)},
        **{name: value.to(device) for name, value in on_device.items()},
    )


@given(step=cut_steps())
def test_each_micro_batch_is_the_step_of_its_own_tokens(
    step: tuple[list[int], list[int], list[int]], twin: Twin, device: torch.device
) -> None:
    """Token by token: three and more micro-batches, requests cut once or at both ends."""
    lens, computed, cuts = step
    whole = full_step(twin, lens, computed, device)
    parts = twin.split_attn_metadata(slices_of(lens, cuts), whole)
    owner = owners_of(lens)
    for part, begin, end in zip(parts, cuts[:-1], cuts[1:], strict=True):
        reqs = sorted({owner[token] for token in range(begin, end)})
        first = {req: owner.index(req) for req in reqs}
        own = {req: [t for t in range(begin, end) if owner[t] == req] for req in reqs}
        new = [len(own[req]) for req in reqs]
        old = [computed[req] + own[req][0] - first[req] for req in reqs]
        seq_lens = counts([a + b for a, b in zip(new, old, strict=True)])
        starts = counts([sum(new[:i]) for i in range(len(new) + 1)])
        encoder = counts([70 + req for req in reqs])
        # an encoder's tokens are in the cache before the rest of a cut request runs
        brought = [req if own[req][0] == first[req] else 0 for req in reqs]
        wanted = [t - begin for t in range(0, sum(lens), 2) if begin <= t < end]
        assert_says(
            part,
            {
                "query_start_loc": starts,
                "query_start_loc_cpu": starts,
                "seq_lens": seq_lens,
                "seq_lens_cpu": seq_lens,
                "num_computed_tokens_cpu": counts(old),
                "num_reqs": len(reqs),
                "num_actual_tokens": end - begin,
                "max_query_len": max(new),
                "max_seq_len": int(seq_lens.max()),
                "block_table_tensor": whole.block_table_tensor.cpu()[
                    reqs[0] : reqs[-1] + 1
                ],
                "slot_mapping": whole.slot_mapping.cpu()[begin:end],
                "causal": False,
                "logits_indices_padded": torch.tensor(wanted, dtype=torch.int32),
                "num_logits_indices": len(wanted),
                "max_logits_per_req": 5,
                "encoder_seq_lens": encoder,
                "encoder_seq_lens_cpu": encoder,
                "max_encoder_seq_len": 99,
                "encoder_query_start_loc": encoder_starts(brought),
                "encoder_query_start_loc_cpu": encoder_starts(brought),
                "cross_block_table_tensor": counts([[7 * req] for req in reqs]),
                "cross_slot_mapping": encoder_slots(brought),
                "tree_mask": None,
                "dcp_local_seq_lens": None,
                "dcp_local_seq_lens_cpu": None,
                "positions": torch.tensor(
                    [
                        old[owner[t] - reqs[0]] + own[owner[t]].index(t)
                        for t in range(begin, end)
                    ]
                ),
                "is_prefilling": torch.tensor([req % 2 == 0 for req in reqs]),
                "mm_req_doc_ranges": {
                    place: [(req, req + 2)]
                    for place, req in enumerate(reqs)
                    if req % 2 == 0
                },
            },
        )


@given(step=cut_steps())
def test_cutting_leaves_the_step_as_it_was(
    step: tuple[list[int], list[int], list[int]], twin: Twin
) -> None:
    lens, computed, cuts = step
    whole, same = (full_step(twin, lens, computed) for _ in range(2))
    twin.split_attn_metadata(slices_of(lens, cuts), whole)
    assert_says(whole, {each.name: getattr(same, each.name) for each in fields(same)})


def test_every_field_says_what_becomes_of_it_when_a_batch_is_cut() -> None:
    """A field that is added later must be named here, or a micro-batch would lose it."""
    named = (
        *metadata_classes.FIELDS_PER_REQUEST,
        *metadata_classes.FIELDS_PER_TOKEN,
        *metadata_classes.FIELDS_CARRIED,
        *metadata_classes.FIELDS_CUT_BY_HAND,
    )
    assert len(set(named)) == len(named)
    assert set(named) == {each.name for each in fields(CommonAttentionMetadata)}


def test_the_middle_of_three_cuts_of_one_request(twin: Twin) -> None:
    """The end was once found by subtracting a token number of the step: 6 instead of 4."""
    step = twin.build_common_attn_metadata([10], [0], [[1]], 16)
    part = twin.make_metadata_with_slice(UBatchSlice(slice(0, 1), slice(2, 6)), step)
    assert part.query_start_loc.tolist() == [0, 4]
    assert part.seq_lens.tolist() == [6]
    assert part.num_computed_tokens_cpu.tolist() == [2]


def test_empty_requests_and_padding_tokens_may_stand_at_the_ends(twin: Twin) -> None:
    step = twin.build_common_attn_metadata([0, 3, 0], [0, 2, 4], [[], [1, 2], [3]], 4)
    step = step.replace(slot_mapping=torch.cat([step.slot_mapping, torch.tensor([-1])]))
    part = twin.make_metadata_with_slice(UBatchSlice(slice(0, 3), slice(0, 4)), step)
    assert part.query_start_loc.tolist() == [0, 0, 3, 3]
    assert part.seq_lens.tolist() == [0, 5, 4]
    assert part.num_actual_tokens == 3
    assert part.slot_mapping.tolist() == step.slot_mapping.tolist()


@given(
    lens=st.lists(st.integers(0, 9), max_size=6),
    first=st.integers(0, 6),
    count=st.integers(0, 6),
)
def test_sliced_starts_begin_with_zero(
    lens: list[int], first: int, count: int, twin: Twin
) -> None:
    starts = counts([sum(lens[:i]) for i in range(len(lens) + 1)])
    before = starts.clone()
    first = min(first, len(lens))
    sliced = twin.slice_query_start_locs(starts, slice(first, first + count))
    own = lens[first : first + count]
    assert sliced.tolist() == [sum(own[:i]) for i in range(len(own) + 1)]
    sliced += 1
    assert torch.equal(starts, before)


def test_a_tree_goes_with_its_request_and_is_not_cut(twin: Twin) -> None:
    """A draft behind the cut would take its siblings for its context."""
    step = twin.build_common_attn_metadata([3, 2, 4], [0] * 3, [[1], [2], [3]], 4)
    tree = torch.arange(27).view(3, 3, 3) % 2 == 0
    step = step.replace(tree_mask=tree)
    part = twin.make_metadata_with_slice(UBatchSlice(slice(1, 3), slice(3, 9)), step)
    assert torch.equal(part.tree_mask, tree[1:])
    assert torch.equal(step.unpadded(5, 2).tree_mask, tree[:2])
    for requests, tokens, words in (
        (slice(0, 2), slice(1, 5), "the first request is cut"),
        (slice(0, 2), slice(0, 4), "the last request is cut"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            twin.make_metadata_with_slice(UBatchSlice(requests, tokens), step)


def test_flags_of_each_request_are_cut_and_one_flag_is_not(twin: Twin) -> None:
    step = twin.build_common_attn_metadata([3, 2], [0] * 2, [[1], [2]], 4)
    half = UBatchSlice(slice(1, 2), slice(3, 5))
    flags = torch.tensor([True, False])
    part = twin.make_metadata_with_slice(half, step.replace(causal=flags))
    assert part.causal.tolist() == [False]
    assert twin.make_metadata_with_slice(half, step).causal is True


def test_slots_of_an_encoder_are_not_cut_without_its_starts(twin: Twin) -> None:
    step = twin.build_common_attn_metadata([3, 2], [0] * 2, [[1], [2]], 4)
    step = step.replace(cross_slot_mapping=torch.arange(4))
    half = UBatchSlice(slice(1, 2), slice(3, 5))
    starts = counts([0, 4, 4])
    with pytest.raises(ValueError, match="encoder_query_start_loc = None: expected"):
        twin.make_metadata_with_slice(half, step)
    step = step.replace(encoder_query_start_loc=starts)
    with pytest.raises(ValueError, match="encoder_query_start_loc_cpu = None"):
        twin.make_metadata_with_slice(half, step)


REFUSED = {
    "no tokens": ((0, 1), (2, 2), "token_slice = .* expected 0 <= start < stop <= 7"),
    "no requests": (
        (1, 1),
        (0, 1),
        "request_slice = .* expected 0 <= start < stop <= 3",
    ),
    "too many requests": ((0, 4), (0, 7), "request_slice = .* expected"),
    "too many tokens": ((0, 3), (0, 8), "token_slice = .* expected"),
    "first token of another request": ((1, 3), (1, 7), "starts outside request 1"),
    "last token of another request": ((0, 2), (0, 2), "ends outside request 1"),
    "last token behind its request": ((0, 2), (0, 6), "ends outside request 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_of_other_requests_are_refused(name: str, twin: Twin) -> None:
    requests, tokens, words = REFUSED[name]
    step = twin.build_common_attn_metadata([2, 3, 2], [0, 0, 0], [[0]] * 3, 16)
    with pytest.raises(ValueError, match=words):
        twin.make_metadata_with_slice(
            UBatchSlice(slice(*requests), slice(*tokens)), step
        )


def test_a_slice_without_ends_is_refused(twin: Twin) -> None:
    starts = counts([0, 2])
    for wrong in (slice(None, 1), slice(0, None), slice(0, 1, 2)):
        with pytest.raises(ValueError, match="both given"):
            twin.slice_query_start_locs(starts, wrong)
    with pytest.raises(ValueError, match=r"request_slice = .* at most 1"):
        twin.slice_query_start_locs(starts, slice(2, 3))


def test_a_sequence_spread_over_ranks_is_not_cut(twin: Twin) -> None:
    step = twin.build_common_attn_metadata([4, 1], [0, 0], [[0]] * 2, 16)
    step = step.replace(dcp_local_seq_lens_cpu=counts([2, 1]))
    with pytest.raises(NotImplementedError, match="leaves out 1 tokens of its last"):
        twin.make_metadata_with_slice(UBatchSlice(slice(0, 1), slice(0, 3)), step)
    whole = twin.make_metadata_with_slice(UBatchSlice(slice(0, 1), slice(2, 4)), step)
    assert whole.dcp_local_seq_lens_cpu.tolist() == [2]
