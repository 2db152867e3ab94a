"""Does each new token get the slot that its position says?"""

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.conformance.generators.batches import GARBAGE
from pagetwin.contract.kinds import PAD_SLOT_ID

block_sizes = st.sampled_from([1, 3, 16, 24, 544])


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[list[int]]]:
    """Return a block size, new tokens, computed tokens, and rows of scattered block ids."""
    block_size = draw(block_sizes)
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1]
    query_lens, computed, rows = [], [], []
    for _ in range(draw(st.integers(0, 5))):
        query_lens.append(draw(st.sampled_from(edges) | st.integers(0, 40)))
        computed.append(draw(st.sampled_from(edges) | st.integers(0, 40)))
        needed = -(-(query_lens[-1] + computed[-1]) // block_size)
        # 2**31 - 1 as a block id: its slot needs 64 bits
        ids = st.sampled_from([0, 1, 2**31 - 1]) | st.integers(0, 3 * needed)
        rows.append(draw(st.lists(ids, min_size=needed, max_size=needed)))
    return block_size, query_lens, computed, rows


def by_hand(
    block_size: int, query_lens: list[int], computed: list[int], rows: list[list[int]]
) -> list[int]:
    return [
        row[position // block_size] * block_size + position % block_size
        for new, old, row in zip(query_lens, computed, rows, strict=True)
        for position in range(old, old + new)
    ]


@given(step=steps(), tail=st.sampled_from(GARBAGE))
def test_a_batch_of_slots_is_what_each_position_says(
    step: tuple[int, list[int], list[int], list[list[int]]], tail: int, twin: Twin
) -> None:
    """Entries past the end of a sequence are never read."""
    block_size, query_lens, computed, rows = step
    tailed = [[*row, tail] for row in rows]
    slots = twin.compute_slot_mapping_batch(query_lens, computed, tailed, block_size)
    assert slots.dtype == torch.int64
    assert slots.tolist() == by_hand(block_size, query_lens, computed, rows)


@given(step=steps(), padding=st.integers(0, 3), spare=st.integers(0, 2))
def test_the_device_finds_the_same_slots(
    step: tuple[int, list[int], list[int], list[list[int]]],
    padding: int,
    spare: int,
    twin: Twin,
    device: torch.device,
) -> None:
    """What lies past the last request has no slot."""
    block_size, query_lens, computed, rows = step
    width = max(map(len, rows), default=0) + spare
    garbage = (GARBAGE * (width + 1))[:width]
    table = [[*row, *garbage[: width - len(row)]] for row in rows]
    starts = [sum(query_lens[:req]) for req in range(len(query_lens) + 1)]
    slots = twin.compute_slot_mapping_device(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(computed, dtype=torch.int32, device=device),
        torch.tensor(table, dtype=torch.int32, device=device).view(len(rows), width),
        block_size,
        starts[-1] + padding,
    )
    expected = by_hand(block_size, query_lens, computed, rows)
    assert slots.dtype == torch.int64 and slots.device.type == device.type
    assert slots.tolist() == expected + [PAD_SLOT_ID] * padding


def test_more_tokens_than_one_program_takes(twin: Twin, device: torch.device) -> None:
    """Requests that end just before, at and just after a program's last token."""
    query_lens, block_size = [255, 0, 1, 0, 1, 256, 300], 16
    rows = [list(range(100 * req, 100 * req + 20)) for req in range(7)]
    starts = [sum(query_lens[:req]) for req in range(8)]
    slots = twin.compute_slot_mapping_device(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.full((7,), 5, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        block_size,
        starts[-1] + 2,
    )
    expected = by_hand(block_size, query_lens, [5] * 7, rows)
    assert slots.tolist() == [*expected, PAD_SLOT_ID, PAD_SLOT_ID]


def test_the_table_may_be_a_view_with_any_strides(
    twin: Twin, device: torch.device
) -> None:
    """An engine keeps one table of the largest batch and slices it."""
    wide = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)
    starts = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
    computed = torch.tensor([2, 0], dtype=torch.int32, device=device)
    for view in (wide[1:3, 2:6], wide.t()[2:6, 1:3].t(), wide[::2, ::3]):
        slots = twin.compute_slot_mapping_device(starts, computed, view, 4, 9)
        assert slots.tolist() == by_hand(4, [3, 6], [2, 0], view.tolist())


def test_starts_and_counts_may_be_views_with_any_strides(
    twin: Twin, device: torch.device
) -> None:
    pairs = torch.tensor([[0, 9], [3, 9], [9, 9]], dtype=torch.int32, device=device)
    computed = torch.tensor([2, 7, 0, 7], dtype=torch.int32, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    slots = twin.compute_slot_mapping_device(pairs[:, 0], computed[::2], table, 4, 9)
    assert slots.tolist() == by_hand(4, [3, 6], [2, 0], table.tolist())


@given(step=steps(), data=st.data())
def test_one_sequence_is_a_batch_of_one(
    step: tuple[int, list[int], list[int], list[list[int]]],
    data: st.DataObject,
    twin: Twin,
) -> None:
    """And new tokens before start_idx get no slot."""
    block_size, query_lens, computed, rows = step
    for new, old, row in zip(query_lens, computed, rows, strict=True):
        start_idx = data.draw(st.integers(0, old + new + 1))
        slots = twin.compute_slot_mapping(
            is_profile_run=False,
            seq_len=old + new,
            context_len=old,
            start_idx=start_idx,
            block_size=block_size,
            block_table=[*row, -5],
        )
        expected = by_hand(block_size, [new], [old], [row])
        hidden = min(max(start_idx - old, 0), new)
        assert slots.dtype == torch.int64
        assert slots.tolist() == [PAD_SLOT_ID] * hidden + expected[hidden:]


def test_a_profile_run_stores_nothing(twin: Twin) -> None:
    slots = twin.compute_slot_mapping(True, 5, 0, 0, 16, None)
    assert slots.tolist() == [PAD_SLOT_ID] * 5


@given(
    query_len=st.integers(0, 50),
    context_len=st.integers(0, 50),
    window=st.none() | st.integers(0, 60),
)
def test_a_prompt_stores_what_later_tokens_can_see(
    query_len: int, context_len: int, window: int | None, twin: Twin
) -> None:
    """The first chunk's rule once served all chunks: it left the context out."""
    first = twin.compute_slot_mapping_start_idx(True, query_len, context_len, window)
    seq_len = context_len + query_len
    stored = [p for p in range(seq_len) if window is None or p >= seq_len - window]
    assert [p for p in range(seq_len) if p >= first] == stored
    assert not twin.compute_slot_mapping_start_idx(
        False, query_len, context_len, window
    )


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_slot_is_seen(shift: int, reference: Twin) -> None:
    slots = reference.compute_slot_mapping_batch([3], [15], [[7, 2]], 16)
    assert slots.tolist() == by_hand(16, [3], [15], [[7, 2]]) == [127, 32, 33]
    assert (slots + shift).tolist() != by_hand(16, [3], [15], [[7, 2]])


def test_the_last_block_of_all_has_a_slot_past_two_billion(
    twin: Twin, device: torch.device
) -> None:
    """block id * block size wraps to a negative slot, which means "do not store", in 32 bits."""
    block_id = 2**31 // 16 + 3
    slots = twin.compute_slot_mapping_device(
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.tensor([5], dtype=torch.int32, device=device),
        torch.tensor([[block_id]], dtype=torch.int32, device=device),
        16,
        1,
    )
    assert slots.tolist() == [block_id * 16 + 5]
