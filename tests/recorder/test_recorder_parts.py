"""Parts of the recorder: stored cases, reports, samples of graphs, the guard, the settings."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.recorder import case as cases
from pagetwin.recorder.case import (
    describe_history,
    load_case,
    save_case,
)
from pagetwin.recorder.findings import Corruption, CorruptionFound
from pagetwin.recorder.graphs import GraphSamples
from pagetwin.recorder.laws.attention import RecordedCall
from pagetwin.recorder.settings import RecorderSettings, prepare_folder
from pagetwin.recorder.step import HostStep, StepCopy
from recorder_parts import (
    FOUND,
    Guarded,
    call_of,
    capture,
    replay,
    reports,
    reproduced,
    samples,
    step,
    stored,
    tensors,
    write_of,
)

# steps


def test_a_copy_of_a_step_does_not_change_with_the_engines_buffers() -> None:
    own = tensors()
    copy = StepCopy(own, 3, "layers")
    for tensor in (
        own.seq_lens,
        own.block_table,
        own.slot_mapping,
        own.query_start_loc,
    ):
        tensor.zero_()
    found = copy.wait(10)
    assert found.seq_lens.tolist() == [6, 5] and found.num_blocks == 10
    # columns that no sequence reaches are left out
    assert found.block_table.tolist() == [[2, 3], [7, 8]]


def test_rows_positions_and_used_blocks_of_a_step() -> None:
    own = step(slot_mapping=[11, 12, 13, 32, -1])
    assert [own.row_of(token) for token in range(4)] == [0, 0, 0, 1]
    assert [own.position_of(token) for token in range(4)] == [3, 4, 5, 4]
    assert own.blocks_of(0).tolist() == [2, 3]
    assert own.written_blocks.tolist() == [2, 3, 3, 8]
    assert own.used.tolist() == [[True, True], [True, True]]
    assert step(seq_lens=[4, 5]).used.tolist() == [[True, False], [True, True]]
    windowed = replace(own, window=1)
    assert windowed.first_keys.tolist() == [3, 4]
    assert windowed.used.tolist() == [[True, True], [False, True]]
    padded = step(query_start_loc=[0, 3, 3])
    assert padded.entries.tolist() == [[2, 3], [-1, -1]]


def test_a_stored_step_is_the_same_again() -> None:
    own = step(block_table=[[2, 3, 5], [7, 8, 5]])
    again = HostStep.of_dict(own.as_dict())
    assert again.block_table.tolist() == [[2, 3], [7, 8]]
    assert again.slot_mapping.tolist() == own.slot_mapping.tolist()
    assert (again.number, again.group) == (5, "layers")


# stored cases


def test_two_cases_of_the_same_step_have_files_of_their_own(tmp_path: Path) -> None:
    paths = {save_case(tmp_path, stored(), 64) for _ in range(2)}
    assert len(paths) == 2


def test_the_limit_counts_all_cases_and_leaves_out_the_oldest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "MEBI", 1)
    whole = cases._size({"step": step().as_dict()})
    own = stored(ring=(step(3), step(4)))
    path = save_case(tmp_path, own, 10_000 + 2 * whole)
    first = path.stat().st_size
    with pytest.raises(OSError, match="already have"):
        save_case(tmp_path, own, first)
    monkeypatch.setattr(cases, "MEBI", 2**20)
    kept = save_case(tmp_path, own, 1)
    assert len(load_case(kept).ring) == 2
    monkeypatch.setattr(cases, "MEBI", 1)
    (tmp_path / "one").mkdir()
    content = save_case(tmp_path / "one", replace(own, ring=()), 10**6)
    size = cases._size(torch.load(content, weights_only=True))
    (tmp_path / "two").mkdir()
    shorter = save_case(tmp_path / "two", own, size + whole)
    assert [ring_step.number for ring_step in load_case(shorter).ring] == [4]


def test_files_that_are_not_cases_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="expected a file that the recorder wrote"
    ):
        load_case(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError):
        load_case(tmp_path)
    (tmp_path / "other.pt").write_bytes(b"PK other")
    other = dict(torch.load(save_case(tmp_path, stored(), 64), weights_only=True))
    torch.save(other | {"format": "other"}, tmp_path / "format.pt")
    for name in ("other.pt", "format.pt"):
        with pytest.raises(ValueError, match="is not a case of the recorder"):
            load_case(tmp_path / name)


def test_a_full_disk_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(content: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("writer failed")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="cannot be written: writer failed"):
        save_case(tmp_path, stored(), 64)
    assert not list(tmp_path.iterdir())


def test_the_history_is_of_requests_that_share_blocks() -> None:
    before = [
        step(2),
        step(3, "others"),
        step(4, query_start_loc=[0, 0, 4], block_table=[[2, 3], [5, 6]]),
        step(4, query_start_loc=[0, 0, 4], block_table=[[5, 6], [3, 1]]),
    ]
    lines = describe_history(stored(ring=tuple(before)))
    words = [line.partition(":")[0] for line in lines]
    assert words == ["step 2, row 0", "step 4, row 1", "step 5, row 0"]
    assert describe_history(stored(Corruption("slots", "wrong"))) == []


# reproduction


def test_a_stored_case_is_checked_again(tmp_path: Path) -> None:
    one, other = torch.zeros(4, 2, 3), torch.ones(4, 2, 3)
    for kind, wrong, right in (
        ("watched", {"before": one, "now": other}, {"before": one, "now": one}),
        (
            "ownership",
            {"block": 3, "rows": [[1, 3], [3]]},
            {"block": 3, "rows": [[1, 3], [4]]},
        ),
        ("block table", {"given": [2, 4]}, {"given": [2, 3, 9]}),
    ):
        assert reproduced(tmp_path, "law", {"kind": kind} | wrong)
        assert not reproduced(tmp_path, "law", {"kind": kind} | right)
    assert reproduced(tmp_path, "groups", {"kind": "groups"})
    assert not reproduced(tmp_path, "slots", {})
    assert reproduced(tmp_path, "slots", {}, step=step(slot_mapping=[11, 12, 14, 32]))


@pytest.mark.parametrize("side", ["key", "value"])
def test_a_stored_write_is_computed_again_with_its_scales(
    side: str, tmp_path: Path
) -> None:
    given = {"key": torch.full((2, 1, 4), 3.0), "value": torch.full((2, 1, 4), 5.0)}
    found = {
        name: (states / 2).to(torch.float8_e4m3fn) for name, states in given.items()
    }
    scales = {"k_scale": torch.tensor(2.0), "v_scale": torch.tensor(2.0)}
    evidence = {"kind": "write", "given": given, "found": found, "scales": scales}
    assert not reproduced(tmp_path, "cache write", evidence)
    evidence["found"] = found | {side: (given[side] / 4).to(torch.float8_e4m3fn)}
    assert reproduced(tmp_path, "cache write", evidence)


# reports


def test_the_first_violation_of_each_law_is_logged_and_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = reports(tmp_path, max_cases=2)
    own.names = {0: "a"}
    own.ring.extend([step(4), (now := step())])
    with caplog.at_level(logging.ERROR, "pagetwin.recorder"):
        own.report(None, now, 5)
        for law in ("slots", "slots", "lengths", "padding"):
            own.report(Corruption(law, "wrong", 0), now, 5)
    assert [finding.law for finding in own.findings] == ["slots", "lengths", "padding"]
    assert {finding.request_id for finding in own.findings} == {"a"}
    assert len(caplog.messages) == 3
    assert "step 5, request 'a': slots: wrong. To check it again" in caplog.messages[0]
    paths = sorted(tmp_path.glob("*.pt"))
    assert len(paths) == 2
    assert [ring_step.number for ring_step in load_case(paths[0]).ring] == [4]


def test_a_case_that_cannot_be_stored_does_not_stop_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr("pagetwin.recorder.reports.save_case", full)
    own = reports(tmp_path)
    own.report(FOUND, step(), 5)
    assert "The case is not stored: disk full" in caplog.text
    stopping = reports(tmp_path, action="stop")
    with pytest.raises(CorruptionFound) as raised:
        stopping.report(FOUND, step(), 5)
    assert raised.value.path is None


def test_progress_is_logged_after_powers_of_two(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = reports(tmp_path)
    counts = dict.fromkeys(("steps", "writes", "rows", "blocks"), 3)
    with caplog.at_level(logging.INFO, "pagetwin.recorder"):
        for sampled in range(9):
            own.log_progress({**counts, "sampled_steps": sampled})
    assert len(caplog.messages) == 4


# the guard


def test_an_error_of_the_recorder_switches_it_off() -> None:
    own = Guarded()
    assert own.run() == 7 and own._depth == 0
    assert own.run(ValueError("own")) is None
    assert not own.is_on and not own.wants_layers and own._depth == 0
    assert own.run() is None and own.calls == 2


def test_a_violation_leaves_the_recorder_and_leaves_it_on() -> None:
    own = Guarded()
    with pytest.raises(CorruptionFound):
        own.run(CorruptionFound("wrong", FOUND, None))
    assert own.is_on and own._depth == 0


# samples


def test_the_first_step_and_every_nth_are_sampled_and_layers_take_turns(
    tmp_path: Path,
) -> None:
    own, _ = samples(tmp_path, sample_every=4)
    assert [n for n in range(1, 14) if own.is_sampled(n)] == [1, 5, 9, 13]
    always, _ = samples(tmp_path, sample_every=1)
    assert all(always.is_sampled(n) for n in range(1, 5))
    own.layers = ["a", "b"]
    turns = [(n, layer) for n in (1, 5, 9) for layer in "ab" if own.is_turn(layer, n)]
    assert turns == [(1, "a"), (5, "b"), (9, "a")]
    assert not own.is_turn("a", 2) and not own.is_turn("c", 2) and own.layers[2] == "c"


def test_writes_and_changes_decide_which_blocks_are_compared(tmp_path: Path) -> None:
    own, found = samples(tmp_path, rows=1)
    key_cache = torch.zeros(10, 4, 1, 2)
    call = RecordedCall(
        "a", torch.zeros(0, 1, 2), torch.zeros(0, 1, 2), key_cache, key_cache.clone(),
        None, AttentionOptions(out_scale=0.5), "other",
    )  # fmt: skip

    def watch_and_compare(changed: bool, written: bool) -> int:
        before = own._checked["blocks"]
        own._next_watched = []
        own._watch(call, step(4))
        assert [watched.block_id for watched in own._next_watched] == [7]
        own.compare_watched(lambda group: step(4), 4)
        own.note_writes(step(4))
        if changed:
            own.note_changes([7], 4)
        if written:
            own.note_writes(
                step(5, block_table=[[2, 3], [7, 8]], slot_mapping=[28, 12, 13, 32])
            )
        own.compare_watched(lambda group: step(5), 5)
        return own._checked["blocks"] - before

    assert watch_and_compare(changed=False, written=False) == 1
    assert watch_and_compare(changed=True, written=False) == 0
    assert watch_and_compare(changed=False, written=False) == 1
    assert not found.findings
    assert own._last_write["layers"][8] == 4
    key_cache_7 = call.key_cache[7]
    own._next_watched = []
    own._watch(call, step(4))
    own.compare_watched(lambda group: step(4), 4)
    key_cache_7 += 1
    own.compare_watched(lambda group: step(5), 5)
    assert [finding.law for finding in found.findings] == ["unchanged blocks"]


# graphs


def test_each_graph_copies_the_rows_of_one_layer_and_they_take_turns() -> None:
    graphs = GraphSamples(2)
    capture(graphs, 6, "a", "b")
    capture(graphs, 4, "a", "b")
    (first,) = replay(graphs, 6)
    (second,) = replay(graphs, 4)
    assert (first.call.layer, first.write.layer) == ("a", "a")
    assert (second.call.layer, second.write.layer) == ("b", "b")
    assert first.tokens == (0, 3) and second.group == "layers"


def test_only_a_graph_that_ran_once_is_compared_and_only_once() -> None:
    graphs = GraphSamples(2)
    capture(graphs, 6, "a")
    assert replay(graphs, 6, runs=0) == [] == replay(graphs, 6, runs=2)
    assert len(replay(graphs, 6)) == 1
    assert graphs.replayed() == []


def test_rows_rise_and_are_within_the_graph() -> None:
    graphs = GraphSamples(4)
    capture(graphs, 6, "a")
    capture(graphs, 3, "a")
    assert {replay(graphs, 6, first=n)[0].tokens for n in range(4)} == {(0, 1, 2, 3)}
    graphs = GraphSamples(2)
    capture(graphs, 6, "a")
    found = [replay(graphs, 6, first=n)[0].tokens for n in range(4)]
    assert found == [(0, 3), (1, 4), (2, 5), (0, 3)]
    assert graphs._graphs[6].rows.tolist() == [0, 3]
    small = GraphSamples(4)
    capture(small, 3, "a")
    assert replay(small, 3)[0].tokens == (0, 1, 2, 2)


def test_the_write_of_another_layer_is_not_that_of_the_call() -> None:
    graphs = GraphSamples(2)
    graphs.prepare(tensors(6))
    graphs.capture_write(write_of("a", 6))
    graphs.capture(call_of("b", 6), "layers")
    (copied,) = replay(graphs, 6)
    assert copied.call.layer == "b" and copied.write is None


def test_a_graph_that_reads_other_buffers_is_found() -> None:
    graphs, own = GraphSamples(2), tensors(6)
    found = graphs.check_buffers(own, "layers")
    assert found is not None and "a graph for 6 tokens is replayed" in found.found
    graphs.prepare(own)
    assert graphs.check_buffers(own, "layers") is None
    assert graphs.check_buffers(tensors(6), "others") is None
    moved = replace(own, seq_lens=own.seq_lens.clone())
    found = graphs.check_buffers(moved, "layers")
    assert found is not None and found.found.startswith(
        "seq_lens of the step is at address"
    )


def test_a_graph_is_prepared_again_on_another_device() -> None:
    graphs = GraphSamples(2)
    first = graphs.prepare(tensors(6))
    assert graphs.prepare(tensors(6)) is first
    meta = tensors(6, slot_mapping=torch.empty(6, device="meta"))
    assert graphs.prepare(meta) is not first


# settings


def test_a_folder_that_cannot_hold_the_cases_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_folder(RecorderSettings(tmp_path / "new"))
    assert (tmp_path / "new").is_dir()
    with pytest.raises(OSError, match="no file can be created there"):
        prepare_folder(RecorderSettings(Path("/proc")))
    free = SimpleNamespace(free=5 * 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
    prepare_folder(RecorderSettings(tmp_path, max_mib=5))
    with pytest.raises(OSError, match="5 MiB are free there"):
        prepare_folder(RecorderSettings(tmp_path, max_mib=6))
