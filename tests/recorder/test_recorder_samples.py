"""Samples of the recorder: which rows, writes and blocks of a step are compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.recorder import samples as module
from pagetwin.recorder.findings import Corruption
from pagetwin.recorder.graphs import CopiedRows
from pagetwin.recorder.laws.attention import RecordedCall
from pagetwin.recorder.samples import Samples
from pagetwin.recorder.step import HostStep
from recorder_parts import call_of, samples, step, write_of

FOUND = Corruption("law", "wrong", 0)


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Return the arguments of each call of a function, which finds something from now on."""
    calls: list[Any] = []

    def call(*args: Any) -> Corruption:
        calls.append(args)
        return FOUND

    monkeypatch.setattr(owner, name, call)
    return calls


def watching(blocks: int = 40) -> RecordedCall:
    """Return a call of a layer whose rows are not recomputed."""
    query, cache = torch.zeros(4, 1, 2), torch.zeros(blocks, 4, 1, 2)
    options = AttentionOptions(out_scale=0.5)
    return RecordedCall("a", query, query, cache, cache.clone(), None, options, "own")


def long(**given: Any) -> HostStep:
    """Return a step of three decodes whose rows have 8, 5 and 2 full blocks."""
    fields = {
        "query_start_loc": [0, 1, 2, 3],
        "seq_lens": [33, 21, 9],
        "block_table": [range(1, 10), range(11, 20), range(21, 30)],
        "slot_mapping": [36, 64, 92],
    } | given
    return step(**fields)


def watched(own: Samples, of_step: HostStep) -> set[tuple[int, int]]:
    """Return the blocks that many steps watch, as row and column."""
    found = set()
    for number in range(200):
        own._next_watched = []
        own._watch(watching(), replace(of_step, number=number))
        assert len(own._next_watched) <= own.settings.watched_blocks
        found |= {
            ((block.block_id - 1) // 10, block.column) for block in own._next_watched
        }
        for block in own._next_watched:
            assert (
                block.block_id == 10 * ((block.block_id - 1) // 10) + block.column + 1
            )
    return found


# rows


def test_rows_of_a_replay_are_those_of_its_tokens_that_no_copy_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that the engine filled in an earlier step holds the tokens of this one."""
    own, _ = samples(tmp_path)
    writes = noted(monkeypatch, own, "_compare_rows_written")
    compared = noted(monkeypatch, own, "compare_rows")
    own.note_changes([3], 5)
    own.note_changes([8], 4)
    call, write = call_of("a", 4), write_of("a", 4)
    copied = CopiedRows(call, write, (0, 1, 3, 4), "layers")
    own.compare_replay(copied, step(slot_mapping=[11, 12, 13, 32, -1]))
    assert [given[2] for given in writes] == [{0: 0, 3: 2}]
    ((taken, _, tokens),) = compared
    assert tokens == [0, 3] and torch.equal(taken.query, call.query[[0, 2]])
    own.compare_replay(replace(copied, write=None), step())
    assert len(writes) == 1 and len(compared) == 2


def test_rows_are_among_the_queries_and_counted_if_they_are_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, reports = samples(tmp_path, rows=4)
    checks = noted(monkeypatch, module, "check_attention")
    watches = noted(monkeypatch, own, "_watch")
    own.compare_attention(watching(), step())
    assert own._checked["rows"] == 0
    own.compare_attention(call_of("a", 2), step())
    assert own._checked["rows"] == 2
    assert [tokens for _, _, tokens, _ in checks] == [[0, 1, 2, 3], [0, 1]]
    assert len(watches) == 2 and [finding.law for finding in reports.findings] == [
        "law"
    ]


def test_written_rows_have_a_slot_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, reports = samples(tmp_path)
    checks = noted(monkeypatch, module, "check_write")
    write = write_of("a", 4)  # a cache of 4 blocks with one slot each
    write = replace(write, key_cache=torch.zeros(4, 4, 1, 2))
    of_step = step(slot_mapping=[0, 15, 16, -1])
    own._compare_rows_written(write, of_step, {2: 0, 3: 1})
    assert not checks and own._checked["writes"] == 0
    own._compare_rows_written(write, of_step, {0: 3, 1: 2, 2: 1, 3: 0})
    ((taken, _, tokens, _),) = checks
    assert tokens == [0, 1] and torch.equal(taken.key, write.key[[3, 2]])
    assert own._checked["writes"] == 2
    assert [finding.law for finding in reports.findings] == ["law"]


def test_the_choice_of_rows_depends_on_the_seed_and_has_its_size(
    tmp_path: Path,
) -> None:
    large = step(query_start_loc=[0, 30, 60], seq_lens=[90, 40])
    chosen = set()
    for seed in range(5):
        own, _ = samples(tmp_path, rows=3, seed=seed)
        found = [own._choose(replace(large, number=number)) for number in range(30)]
        assert all(len(set(rows)) == 3 and 29 in rows for rows in found)
        chosen.add(str(found))
    assert len(chosen) == 5
    own, _ = samples(tmp_path, rows=9)
    assert own._choose(step()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("starts", "lens", "first", "last"),
    [
        ([0, 3, 3, 4], [5, 90, 6], None, 3),  # the longest request has no new token
        ([0, 3, 60], [6, 90], 20, 2),  # its last token is past the limit
        ([0, 3, 60], [6, 90], None, 59),
        ([0, 40, 60], [6, 90], 20, 19),  # so is that of all requests
    ],
)
def test_the_last_token_is_one_of_the_step_within_the_limit(
    tmp_path: Path, starts: list[int], lens: list[int], first: int | None, last: int
) -> None:
    own, _ = samples(tmp_path, rows=1)
    of_step = step(query_start_loc=starts, seq_lens=lens)
    for number in range(9):
        assert own._choose(replace(of_step, number=number), first) == [last]


# blocks


def test_full_blocks_of_requests_with_new_tokens_are_watched(tmp_path: Path) -> None:
    own, _ = samples(tmp_path, watched_blocks=2)
    every = {
        (row, column) for row, count in enumerate((8, 5, 2)) for column in range(count)
    }
    assert watched(own, long()) == every
    absent = long(query_start_loc=[0, 1, 1, 2], slot_mapping=[36, 92])
    assert watched(own, absent) == {block for block in every if block[0] != 1}
    # the block that a prompt fills is written in this step
    prompt = long(query_start_loc=[0, 33, 34, 35], slot_mapping=range(35))
    assert watched(own, prompt) == {block for block in every if block[0]}
    many, _ = samples(tmp_path, watched_blocks=9)
    many._watch(watching(), long())
    assert len(many._next_watched) == 3


@pytest.mark.parametrize(("window", "first"), [(9, 6), (8, 7), (5, 7), (4, 8)])
def test_blocks_that_begin_before_the_window_are_not_watched(
    tmp_path: Path, window: int, first: int
) -> None:
    """The first key of 33 with a window of 9 is 24, the start of block 6."""
    own, _ = samples(tmp_path)
    found = watched(own, replace(long(), window=window))
    assert {column for row, column in found if row == 0} == set(range(first, 8))


def test_the_last_write_of_each_block_is_noted_by_group(tmp_path: Path) -> None:
    own, _ = samples(tmp_path)
    own.note_writes(step(3))
    assert own._last_write["layers"].tolist() == [0, 0, 3, 3, 0, 0, 0, 0, 3]
    own.note_writes(step(4, slot_mapping=[0, 40]))
    found = own._last_write["layers"].tolist()
    assert found == [4, 0, 3, 3, 0, 0, 0, 0, 3, 0, 4]
    own.note_writes(replace(step(5, "b", slot_mapping=[-1]), num_blocks=12))
    assert own._last_write["b"].tolist() == [0] * 12
    assert own._last_write["layers"].tolist() == found


def test_watched_blocks_are_compared_once_in_the_next_sampled_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, reports = samples(tmp_path, watched_blocks=3)
    checks = noted(monkeypatch, module, "check_watched")
    steps = {"layers": long()}
    own.note_writes(long())
    own._watch(watching(), long())
    for number in range(3):
        own.compare_watched(steps.get, 5)
        assert len(checks) == (3 if number else 0)
    assert own._checked["blocks"] == 3
    assert [finding.law for finding in reports.findings] == ["law"]
    # a group that has no step, or no writes
    for group, of_group in (("layers", {}), ("c", {"c": long()})):
        own._watch(watching(), replace(long(), group=group))
        own.compare_watched(of_group.get, 5)
        own.compare_watched(of_group.get, 5)
    assert len(checks) == 3


def test_changes_by_the_engine_count_until_the_step_after_them(tmp_path: Path) -> None:
    own, _ = samples(tmp_path)
    own.note_changes([1], 3)
    own.note_changes([2], 4)
    own.note_changes([3], 5)
    own.compare_watched(lambda group: None, 4)
    assert own._changed == {2: 4, 3: 5}


# steps


def test_entries_are_used_from_the_block_of_the_first_key_on() -> None:
    own = step(seq_lens=[9, 10], query_start_loc=[0, 1, 2], block_table=[[1, 2, 3]] * 2)
    for window, used in (
        (None, "111 111"),
        (6, "111 011"),
        (5, "011 011"),
        (99, "111 111"),
    ):
        windowed = replace(own, window=window)
        found = ["".join(map(str, row)) for row in windowed.used.astype(int)]
        assert " ".join(found) == used
        assert (windowed.first_keys >= 0).all()
    prompt = replace(step(), window=1)
    assert prompt.first_keys.tolist() == [3, 4]
    assert step(query_start_loc=[0, 3, 3]).used.tolist() == [[True] * 2, [False] * 2]


def test_a_step_without_requests_and_the_first_slot() -> None:
    none = step(query_start_loc=[], seq_lens=[], slot_mapping=[0, -1])
    assert none.num_tokens == 0 and none.written_blocks.tolist() == [0]
    own = step(seq_lens=[3, 5])
    assert own.entries.tolist() == [[2, -1], [7, 8]]


def test_a_stored_step_has_the_columns_that_are_used_alone() -> None:
    own = step(block_table=np.arange(2_000).reshape(2, 1_000))
    kept = own.as_dict()["block_table"]
    assert kept.shape == (2, 2) and kept.untyped_storage().nbytes() == 32
    assert step(seq_lens=[0, 0]).as_dict()["block_table"].shape == (2, 1)
