"""Does every position lie on one rank, and does every rank know how many it has?"""

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st

lengths = st.lists(st.integers(0, 70), max_size=5)
worlds = st.sampled_from([1, 2, 3, 4, 8])
runs = st.sampled_from([1, 2, 3, 16])


@given(lens=lengths, world=worlds, in_a_row=runs)
def test_the_ranks_share_out_every_position(
    lens: list[int], world: int, in_a_row: int, twin: Twin, device: torch.device
) -> None:
    """Dealt out like cards: in_a_row to each rank, then again from the first."""
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    local = twin.get_dcp_local_seq_lens(seq_lens, world, None, in_a_row)
    assert tuple(local.shape) == (len(lens), world)
    assert local.dtype == torch.int32 and local.device == seq_lens.device
    assert local.sum(1).tolist() == lens
    hands = [[0] * world for _ in lens]
    for hand, seq_len in zip(hands, lens, strict=True):
        left, rank = seq_len, 0
        while left:
            dealt = min(left, in_a_row)
            hand[rank] += dealt
            left, rank = left - dealt, (rank + 1) % world
    assert local.tolist() == hands
    for rank in range(world):
        one = twin.get_dcp_local_seq_lens(seq_lens, world, rank, in_a_row)
        assert one.tolist() == [hand[rank] for hand in hands]
    assert seq_lens.tolist() == lens


@given(length=st.integers(0, 70), world=worlds, in_a_row=runs)
def test_the_owners_of_positions_count_up_to_the_local_lengths(
    length: int, world: int, in_a_row: int, twin: Twin, device: torch.device
) -> None:
    positions = torch.arange(length, device=device)
    ranks = twin.get_dcp_ranks(positions, world, in_a_row).tolist()
    lens = torch.tensor([length], dtype=torch.int32, device=device)
    local = twin.get_dcp_local_seq_lens(lens, world, None, in_a_row)
    assert [ranks.count(rank) for rank in range(world)] == local[0].tolist()
    assert ranks[: in_a_row * world] == [
        place // in_a_row for place in range(min(length, in_a_row * world))
    ]


def test_one_rank_keeps_its_axis(twin: Twin) -> None:
    """vLLM drops it, so that the shape depends on how many ranks there are."""
    lens = torch.tensor([7, 8], dtype=torch.int32)
    assert twin.get_dcp_local_seq_lens(lens).tolist() == [[7], [8]]
    assert twin.get_dcp_local_seq_lens(lens, dcp_rank=0).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dcp_world_size": 0}, "dcp_world_size = 0: expected at least 1"),
        ({"dcp_world_size": 2, "dcp_rank": 2}, "dcp_rank = 2: expected 0 <= rank"),
        ({"dcp_rank": -1}, "dcp_rank = -1"),
        ({"dcp_kv_cache_interleave_size": 0}, "interleave_size = 0"),
    ],
)
def test_ranks_that_cannot_be_are_refused(
    arguments: dict[str, int], words: str, twin: Twin
) -> None:
    arguments = dict(arguments)
    with pytest.raises(ValueError, match=words):
        twin.get_dcp_local_seq_lens(torch.tensor([7], dtype=torch.int32), **arguments)
    arguments.pop("dcp_rank", None)
    if arguments.get("dcp_world_size") != 2 and arguments:
        with pytest.raises(ValueError, match=words):
            twin.get_dcp_ranks(torch.arange(3), **{"dcp_world_size": 1, **arguments})
