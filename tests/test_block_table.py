"""Do the rows of the block table hold the blocks they were given?"""

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st

block_ids = st.integers(0, 2**31 - 1)
tables = st.lists(st.lists(block_ids, max_size=5), max_size=5)


@given(num_tokens=st.integers(0, 10**6), block_size=st.sampled_from([1, 3, 16, 544]))
def test_the_blocks_hold_the_tokens_and_none_is_left_over(
    num_tokens: int, block_size: int, twin: Twin
) -> None:
    blocks = twin.blocks_needed(num_tokens, block_size)
    assert blocks * block_size >= num_tokens
    assert (blocks - 1) * block_size < num_tokens
    assert type(blocks) is int


@given(rows=tables, spare=st.sampled_from([None, 0, 1, 4]))
def test_a_table_is_its_rows_padded_with_zero(
    rows: list[list[int]], spare: int | None, twin: Twin, device: torch.device
) -> None:
    longest = max(map(len, rows), default=0)
    max_blocks = None if spare is None else longest + spare
    table = twin.make_block_table(rows, max_blocks, device)
    width = longest if max_blocks is None else max_blocks
    assert table.dtype == torch.int32 and table.device.type == device.type
    assert tuple(table.shape) == (len(rows), width)
    assert table.tolist() == [[*row, *[0] * (width - len(row))] for row in rows]


@given(lens=st.lists(st.sampled_from([0, 1, 90, 300]), max_size=4))
def test_long_rows_are_padded_like_short_ones(lens: list[int], twin: Twin) -> None:
    """The twin writes short rows all at once and long ones row by row."""
    rows = [[1000 * req + entry for entry in range(n)] for req, n in enumerate(lens)]
    width = max(lens, default=0)
    table = twin.make_block_table(rows)
    assert table.tolist() == [[*row, *[0] * (width - len(row))] for row in rows]


@given(rows=tables, data=st.data())
def test_appended_blocks_stand_behind_their_row(
    rows: list[list[int]], data: st.DataObject, twin: Twin, device: torch.device
) -> None:
    """And nothing else of the table changes, whatever stood there."""
    reqs = len(rows)
    new = data.draw(
        st.lists(st.lists(block_ids, max_size=3), min_size=reqs, max_size=reqs)
    )
    table = torch.full((reqs, 9), -7, dtype=torch.int32)
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    expected = [
        (row + added + table[req, len(row) + len(added) :].tolist())
        for req, (row, added) in enumerate(zip(rows, new, strict=True))
    ]
    held = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    table, given_counts = table.to(device), held.clone()
    counts = twin.append_blocks(table, given_counts, new)
    assert table.tolist() == expected
    assert counts.tolist() == [len(a) + len(b) for a, b in zip(rows, new, strict=True)]
    assert counts.dtype == torch.int32
    assert torch.equal(given_counts, held), "the counts given are not changed"


@pytest.mark.parametrize("bad", [[[1, 2, 3], []], [[1], [-2]]])
def test_a_refused_append_leaves_the_table_as_it_was(
    bad: list[list[int]], twin: Twin, device: torch.device
) -> None:
    table = torch.tensor([[7, 2, 0], [5, 0, 0]], dtype=torch.int32, device=device)
    before = table.clone()
    held = torch.tensor([2, 1], dtype=torch.int32)
    with pytest.raises(IndexError):
        twin.append_blocks(table, held, bad)
    assert torch.equal(table, before)
