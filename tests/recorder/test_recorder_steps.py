"""The steps of the recorder: copies of an engine's metadata, in their order, each checked once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.recorder import steps as module
from pagetwin.recorder.findings import Corruption
from pagetwin.recorder.laws.schedule import ScheduledGroup
from pagetwin.recorder.laws.scheduled_rows import ScheduledRow, ScheduledRows
from pagetwin.recorder.reports import Reports
from pagetwin.recorder.settings import RecorderSettings
from pagetwin.recorder.step import HostStep, StepCopy, StepTensors, step_tensors
from pagetwin.recorder.steps import CheckedSteps
from recorder_parts import tensors

ROWS = [ScheduledRow("a", 3, 3, [2, 3]), ScheduledRow("b", 4, 1, [7, 8])]
"""The requests of `tensors`."""


class Steps(CheckedSteps):
    """Steps whose writes are noted, and whose findings are kept with their steps."""

    def __init__(self, folder: Path) -> None:
        self.written: list[HostStep] = []
        samples: Any = SimpleNamespace(note_writes=self.written.append)
        self.reports = Reports(RecorderSettings(folder))
        super().__init__(self.reports, samples)

    @property
    def found(self) -> list[str]:
        return [finding.law for finding in self.reports.findings]

    def plan(self, *rows: ScheduledRow, block_size: int = 4) -> Corruption | None:
        groups: Any = {0: ScheduledGroup([*rows], block_size)}
        return self.schedule(groups, (), True)


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def wrong_slots(**given: Any) -> StepTensors:
    return tensors(slot_mapping=torch.tensor([11, 12, 14, 32, -1, -1]), **given)


# copies


def test_a_step_has_the_fields_of_the_metadata_and_of_its_layers() -> None:
    own = tensors()
    common = CommonAttentionMetadata(
        query_start_loc=own.query_start_loc,
        query_start_loc_cpu=own.query_start_loc,
        seq_lens=own.seq_lens,
        seq_lens_cpu=own.seq_lens,
        num_computed_tokens_cpu=own.seq_lens,
        num_reqs=2,
        num_actual_tokens=4,
        max_query_len=3,
        max_seq_len=6,
        block_table_tensor=own.block_table,
        slot_mapping=own.slot_mapping,
    )
    found = step_tensors(common, 4, window=7, stores_all=False)
    assert (found.max_query_len, found.max_seq_len, found.block_size) == (3, 6, 4)
    assert (found.window, found.stores_all) == (7, False)
    assert found.addresses() == own.addresses() and len(found.addresses()) == 4
    copy = StepCopy(found, 3, "b").wait(9)
    assert (copy.number, copy.group, copy.num_blocks) == (3, "b", 9)
    assert (copy.window, copy.stores_all) == (7, False)


@pytest.mark.parametrize(("longest", "width"), [(0, 1), (4, 1), (5, 2), (99, 4)])
def test_a_copy_has_the_columns_of_the_longest_sequence(
    longest: int, width: int
) -> None:
    own = tensors()
    given = {**vars(own), "max_seq_len": longest}
    assert (
        StepCopy(StepTensors(**given), 1, "a").wait(None).block_table.shape[1] == width
    )


def test_a_copy_is_waited_for() -> None:
    copy, waits = StepCopy(tensors(), 1, "a"), []
    copy._event = SimpleNamespace(synchronize=lambda: waits.append(1))
    copy.wait(None)
    assert len(waits) == 1


# the current step


def test_a_step_begins_with_the_first_group_or_with_one_that_it_has(
    steps: Steps,
) -> None:
    assert steps.is_new("a") and not steps.has_begun
    steps.begin(tensors(), 1, "a")
    assert steps.has_begun and steps.is_new("a") and not steps.is_new("b")
    steps.end()
    assert steps.is_new("b") and not steps.has_begun
    steps.check_all()  # the copy of a step that has ended is not a current step
    assert len(steps.written) == 1 and not steps.has_begun


def test_all_copies_are_checked_in_their_order_and_kept(steps: Steps) -> None:
    steps.num_blocks = {"a": 20, "b": 30}
    for number, group in ((1, "a"), (1, "b"), (2, "a")):
        steps.begin(tensors(), number, group)
    assert not steps.written
    step = steps.host_step("b")
    assert step is not None and (step.number, step.num_blocks) == (1, 30)
    assert [(written.number, written.group) for written in steps.written] == [
        (1, "a"),
        (1, "b"),
        (2, "a"),
    ]
    assert list(steps.reports.ring) == steps.written and not steps.found
    assert [written.num_blocks for written in steps.written] == [20, 30, 20]
    step = steps.host_step("a")
    assert step is not None and step.number == 2
    assert steps.host_step("c") is None


def test_a_copy_that_is_not_checked_is_not_a_step(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.begin(tensors(), 1, "a")
    monkeypatch.setattr(steps, "check_all", lambda: None)
    assert steps.host_step("a") is None


def test_a_violation_of_one_group_comes_before_that_of_two(steps: Steps) -> None:
    steps.begin(tensors(), 1, "a")
    other = {"seq_lens": torch.tensor([6, 6])}
    steps.begin(wrong_slots(**other), 1, "b")
    steps.check_all()
    assert steps.found == ["slots"]
    steps.end()
    steps.begin(tensors(), 2, "a")
    slots = torch.tensor([11, 12, 13, 33, -1, -1])
    steps.begin(tensors(slot_mapping=slots, **other), 2, "b")
    steps.check_all()
    assert steps.found == ["slots", "groups"]


# the scheduler's rows


def test_the_rows_of_a_schedule_name_the_requests_of_its_step(steps: Steps) -> None:
    assert steps.plan(*ROWS) is None
    steps.begin(tensors(), 1, "a")
    steps.begin(tensors(), 1, "b")
    steps.check_all()
    assert steps.reports.names == {0: "a", 1: "b"}
    steps.end()
    # the next step was not scheduled: nothing is compared with the rows of this one
    moved = tensors(
        seq_lens=torch.tensor([3, 5]), slot_mapping=torch.tensor([8, 9, 10, 32])
    )
    steps.begin(moved, 2, "a")
    steps.check_all()
    assert steps.reports.names == {} and not steps.found


def test_rows_that_are_not_the_schedulers_are_found(steps: Steps) -> None:
    steps.plan(ROWS[0], ScheduledRow("b", 4, 1, [7, 9]))
    steps.begin(tensors(), 1, "a")
    steps.check_all()
    assert steps.found == ["block table"]


@pytest.mark.parametrize("block_size", [2, 4])
def test_rows_of_blocks_of_another_size_are_not_compared(
    steps: Steps, block_size: int
) -> None:
    steps.plan(ROWS[0], ScheduledRow("b", 4, 1, [7, 9, 1]), block_size=block_size)
    steps.begin(tensors(), 1, "a")
    steps.check_all()
    assert steps.found == (["block table"] if block_size == 4 else [])


def test_rows_are_those_of_the_groups_own_name(steps: Steps) -> None:
    groups: Any = {0: ScheduledGroup([], 4), "x": ScheduledGroup(ROWS, 4)}
    steps.schedule(groups, (), True)
    steps.begin(tensors(scheduler_group="x"), 1, "a")
    steps.check_all()
    assert steps.reports.names == {0: "a", 1: "b"} and not steps.found


def test_a_step_without_tokens_has_no_rows(steps: Steps) -> None:
    steps.plan(*ROWS)
    none = torch.zeros(3, dtype=torch.int64), torch.full((6,), -1)
    steps.begin(tensors(query_start_loc=none[0], slot_mapping=none[1]), 1, "a")
    steps.check_all()
    assert not steps.found and not steps.reports.names


@pytest.mark.parametrize(
    ("others", "num_blocks", "is_own"),
    [
        ([], None, True),
        ([], 20, True),
        ([], 8, False),
        ([ScheduledRow("c", 0, 1, [8])], None, False),
    ],
)
def test_laws_of_rows_are_checked_unless_the_rows_are_the_requests_own(
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    others: list[ScheduledRow],
    num_blocks: int | None,
    is_own: bool,
) -> None:
    """They are not if a block is past the cache, or if another request holds it."""
    checked: list[bool] = []
    monkeypatch.setattr(
        module, "check_step", lambda step, has_own_rows: checked.append(has_own_rows)
    )
    monkeypatch.setattr(
        ScheduledRows, "match", lambda rows, step: ({0: "a", 1: "b"}, None)
    )
    if num_blocks is not None:
        steps.num_blocks["a"] = num_blocks
    assert (steps.plan(*ROWS, *others) is not None) == bool(others)
    steps.begin(tensors(), 1, "a")
    steps.check_all()
    assert checked == [is_own]


def test_what_one_schedule_frees_the_next_one_may_give_away(steps: Steps) -> None:
    """One ledger serves all steps, and its lines are free once their steps are checked."""
    assert steps.plan(*ROWS) is None
    steps.begin(tensors(), 1, "a")
    steps.check_all()
    groups: Any = {0: ScheduledGroup([ScheduledRow("c", 0, 1, [7])], 4)}
    found = steps.schedule(groups, (), True)
    assert found is not None and found.law == "block ownership"
    other = Steps(steps.reports.settings.folder)
    other.schedule({0: ScheduledGroup(ROWS, 4)}, (), False)
    assert other.schedule(groups, (), False) is None
    ledger = other._ledger
    assert ledger is not None and not ledger.knows_all
    removed = ledger._groups[0].table
    assert removed._removed
    other.check_all()
    assert not removed._removed
