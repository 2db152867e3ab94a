"""Do rows hold what they were given, wherever they move?"""

from typing import Any

import pytest
import torch
from conftest import TWINS, Twin
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

ROWS, WIDTH = 4, 5
block_lists = st.lists(st.integers(0, 1000), max_size=WIDTH)
rows = st.integers(0, ROWS - 1)


class TableAgainstLists(RuleBasedStateMachine):
    """A table and a list of lists go through the same; then they hold the same."""

    twin: Twin
    device: torch.device

    @initialize(
        kernel=st.sampled_from([2, 4, 8]),
        world=st.sampled_from([1, 2, 3]),
        in_a_row=st.sampled_from([1, 2]),
        data=st.data(),
    )
    def start(self, kernel: int, world: int, in_a_row: int, data: Any) -> None:
        self.kernel, self.world, self.in_a_row = kernel, world, in_a_row
        self.rank = data.draw(st.integers(0, world - 1))
        self.table = self.twin.BlockTable(
            block_size=8,
            max_num_reqs=ROWS,
            max_num_blocks_per_req=WIDTH,
            device=self.device,
            kernel_block_size=kernel,
            dcp_world_size=world,
            dcp_rank=self.rank,
            dcp_kv_cache_interleave_size=in_a_row,
        )
        self.lists: list[list[int]] = [[] for _ in range(ROWS)]

    @rule(blocks=block_lists, row=rows)
    def add(self, blocks: list[int], row: int) -> None:
        self.table.add_row(blocks, row)
        self.lists[row] = list(blocks)

    @rule(blocks=block_lists, row=rows)
    def append(self, blocks: list[int], row: int) -> None:
        if len(self.lists[row]) + len(blocks) > WIDTH:
            with pytest.raises(IndexError, match="make max_num_blocks_per_req larger"):
                self.table.append_row(blocks, row)
            return
        self.table.append_row(blocks, row)
        self.lists[row] += blocks

    @rule(src=rows, tgt=rows)
    def move(self, src: int, tgt: int) -> None:
        self.table.move_row(src, tgt)
        self.lists[tgt] = list(self.lists[src])

    @rule(src=rows, tgt=rows)
    def swap(self, src: int, tgt: int) -> None:
        self.table.swap_row(src, tgt)
        self.lists[src], self.lists[tgt] = self.lists[tgt], self.lists[src]

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.lists = [[] for _ in range(ROWS)]

    @rule(req=rows, past=st.sampled_from([0, 1, 8]))
    def look_past_the_end(self, req: int, past: int) -> None:
        with pytest.raises(
            IndexError, match=rf"positions\[0\] = {self.reach(req) + past}"
        ):
            self.table.compute_slot_mapping([req], [self.reach(req) + past])

    def reach(self, req: int) -> int:
        """Return the positions that a row's blocks hold, on all ranks together."""
        return 8 * self.world * len(self.lists[req])

    @invariant()
    def every_position_has_its_slot(self) -> None:
        """The tokens that this rank keeps fill its blocks one by one."""
        if not hasattr(self, "table"):
            return
        reqs, positions, slots = [], [], []
        for req, row in enumerate(self.lists):
            kept = 0
            for position in range(self.reach(req)):
                mine = position // self.in_a_row % self.world == self.rank
                slots.append(row[kept // 8] * 8 + kept % 8 if mine else -1)
                reqs.append(req)
                positions.append(position)
                kept += mine
        assert self.table.compute_slot_mapping(reqs, positions).tolist() == slots

    @invariant()
    def the_rows_are_the_lists(self) -> None:
        if not hasattr(self, "table"):
            return
        split = 8 // self.kernel
        expected = [
            [block * split + part for block in row for part in range(split)]
            for row in self.lists
        ]
        assert self.table.num_blocks_per_row == [len(row) for row in expected]
        width = WIDTH * split
        tensor = self.table.get_device_tensor(ROWS)
        assert tensor.dtype == torch.int32 and tensor.device.type == self.device.type
        assert tensor.tolist() == [row + [0] * (width - len(row)) for row in expected]


def test_a_table_is_a_list_of_lists(twin: Twin, device: torch.device) -> None:
    machine = type("Machine", (TableAgainstLists,), {"twin": twin, "device": device})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=80, stateful_step_count=20)
    )


def test_a_returned_table_does_not_follow_the_rows(twin: Twin) -> None:
    """A step's metadata stays as it was while the next step is planned."""
    table = twin.BlockTable(4, 2, 3)
    table.add_row([7, 2], 0)
    before = table.get_device_tensor(2)
    table.append_row([9], 0)
    assert before.tolist() == [[7, 2, 0], [0, 0, 0]]


def test_nothing_of_a_longer_row_is_left(twin: Twin) -> None:
    """vLLM leaves its ids behind the new row's end."""
    table = twin.BlockTable(4, 2, 3)
    table.add_row([7, 2, 5], 0)
    table.add_row([9], 0)
    assert table.get_device_tensor(1).tolist() == [[9, 0, 0]]
    table.add_row([1, 2, 3], 1)
    table.move_row(0, 1)
    assert table.get_device_tensor(2).tolist() == [[9, 0, 0], [9, 0, 0]]


def test_a_refused_row_stays_as_it_was(twin: Twin) -> None:
    table = twin.BlockTable(4, 2, 2)
    table.add_row([7], 0)
    for blocks in ([1, 2, 3], [-1], [2**31]):
        for write in (table.add_row, table.append_row):
            with pytest.raises(IndexError):
                write(blocks, 0)
    assert table.get_device_tensor(2).tolist() == [[7, 0], [0, 0]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block_size": 0}, "block_size = 0"),
        (
            {"kernel_block_size": 3},
            "block_size = 4 is not a multiple of kernel_block_size",
        ),
        (
            {"kernel_block_size": 8},
            "block_size = 4 is not a multiple of kernel_block_size",
        ),
        ({"max_num_reqs": -1}, "max_num_reqs = -1"),
        ({"dcp_rank": 1}, "dcp_rank = 1: expected 0 <= rank < dcp_world_size = 1"),
        (
            {"dcp_world_size": 2, "dcp_kv_cache_interleave_size": 3},
            "kernel_block_size = 4 is not a multiple of dcp_kv_cache_interleave_size = 3",
        ),
    ],
)
def test_tables_that_cannot_be_are_refused(
    arguments: dict[str, int], words: str, twin: Twin
) -> None:
    good = {"block_size": 4, "max_num_reqs": 2, "max_num_blocks_per_req": 2}
    with pytest.raises(ValueError, match=words):
        twin.BlockTable(**good | arguments)


def test_rows_that_are_not_there_are_refused(twin: Twin) -> None:
    table = twin.BlockTable(4, 2, 2)
    for call, words in (
        (lambda: table.add_row([1], 2), "row_idx = 2: expected 0 <= row < 2"),
        (lambda: table.append_row([1], -1), "row_idx = -1"),
        (lambda: table.move_row(2, 0), "src = 2"),
        (lambda: table.swap_row(0, 2), "tgt = 2"),
        (lambda: table.compute_slot_mapping([2], [0]), r"req_indices\[0\] = 2"),
        (lambda: table.get_device_tensor(3), "num_reqs = 3"),
    ):
        with pytest.raises(IndexError, match=words):
            call()
    with pytest.raises(
        ValueError, match="req_indices has 1 entries but positions has 2"
    ):
        table.compute_slot_mapping([0], [0, 1])


@given(
    lens=st.lists(st.integers(0, 20), max_size=4),
    block_size=st.sampled_from([1, 4]),
    drafted=st.integers(0, 2),
)
def test_a_mamba_layer_gets_its_last_blocks(
    lens: list[int], block_size: int, drafted: int, twin: Twin, device: torch.device
) -> None:
    rows = [[100 * req + entry for entry in range(23)] for req in range(len(lens))]
    table = twin.make_block_table(rows, 23, device)
    before = table.clone()
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    picked = twin.mamba_get_block_table_tensor(
        table, seq_lens, block_size, drafted, "align"
    )
    assert picked.dtype == torch.int32 and picked.device == table.device
    firsts = [max(0, -(-n // block_size) - 1) for n in lens]
    assert picked.tolist() == [
        row[first : first + 1 + drafted]
        for row, first in zip(rows, firsts, strict=True)
    ]
    assert torch.equal(table, before)
    for mode in ("none", "all"):
        same = twin.mamba_get_block_table_tensor(
            table, seq_lens, block_size, drafted, mode
        )
        assert same is table


def test_mamba_rows_that_cannot_be_are_refused(
    twin: Twin, checked_values: None, device: torch.device
) -> None:
    table = torch.zeros(1, 3, dtype=torch.int32, device=device)
    lens = torch.tensor([9], dtype=torch.int32, device=device)
    ask = twin.mamba_get_block_table_tensor
    with pytest.raises(ValueError, match="mamba_cache_mode = 'last'"):
        ask(table, lens, 4, 0, "last")
    with pytest.raises(ValueError, match="block_size = 0"):
        ask(table, lens, 0)
    with pytest.raises(IndexError, match="needs 4 entries: expected at most 3"):
        ask(table, lens, 4, 1, "align")


def test_both_twins_have_a_table() -> None:
    assert {
        name: each.BlockTable(4, 1, 1).block_size for name, each in TWINS.items()
    } == {
        "reference": 4,
        "optimized": 4,
    }
