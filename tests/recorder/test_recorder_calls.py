"""What the recorder does in each call of an engine: captures, steps, writes and attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.scheduler_classes import (
    Request,
    ScheduledRequest,
    SchedulerOutput,
)
from pagetwin.recorder import Recorder
from pagetwin.recorder.laws.scheduled_rows import ScheduledRow
from pagetwin.recorder.settings import RecorderSettings
from recorder_parts import ROWS, tensors


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(RecorderSettings(tmp_path, sample_every=4))


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a CUDA graph be captured."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Return the arguments of each call of a method, which does nothing from now on."""
    calls: list[Any] = []
    monkeypatch.setattr(owner, name, lambda *args, **given: calls.append(args))
    return calls


def write(
    recorder: Recorder, layer: str = "a", value: Any = 1.0, **given: Any
) -> torch.Tensor:
    """Tell of a cache write of all tokens of `tensors`, and return the cache."""
    cache = torch.zeros(10, 4, 1, 2)
    key = torch.ones(6, 1, 2)
    recorder.wrote(layer, key, value and key, cache, cache, **given)
    return cache


def attend(recorder: Recorder, layer: str = "a", **given: Any) -> None:
    """Tell of attention that is not recomputed."""
    query, cache = torch.zeros(6, 1, 2), torch.zeros(10, 4, 1, 2)
    options = AttentionOptions(out_scale=0.5)
    recorder.attended(layer, query, query, cache, cache, None, options, **given)


# steps


def test_a_recorder_says_once_that_it_is_on(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = noted(monkeypatch, recorder._reports, "log_start")
    recorder.attach()
    recorder.attach()
    assert len(starts) == 1 and recorder.is_attached


def test_a_schedule_is_that_of_the_next_step(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = noted(monkeypatch, recorder._steps, "schedule")
    reported = noted(monkeypatch, recorder._reports, "report")
    recorder.schedule(ROWS, 4, ["c"], knows_all=False)
    ((groups, freed, knows_all),) = given
    assert (groups[0].rows, groups[0].block_size) == (ROWS, 4)
    assert (freed, knows_all) == (["c"], False)
    assert reported == [(None, None, 1)]


def test_the_schedulers_output_tells_rows_changed_blocks_and_freed_requests(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = noted(monkeypatch, recorder._steps, "schedule")
    changed: list[Any] = []
    monkeypatch.setattr(
        recorder._samples,
        "note_changes",
        lambda ids, step: changed.append([*ids, step]),
    )
    one, other = Request("a", [1], 2), Request("b", [1], 2)
    scheduled = [
        ScheduledRequest(request, 3, 2, 0, [4, 5], True) for request in (one, other)
    ]
    recorder.step = 7
    output = SchedulerOutput(scheduled, [9], [(1, 2)], ["p"])
    recorder.schedule_output(output, 4)
    one.append_output_token(1)
    one.append_output_token(1)
    recorder.schedule_output(SchedulerOutput(scheduled[1:]), 4)
    recorder.schedule_output(SchedulerOutput(), 4)
    assert changed == [[9, 2, 7], [7], [7]]
    rows = [ScheduledRow(name, 3, 2, [4, 5]) for name in "ab"]
    assert [groups[0].rows for groups, _, _ in given] == [rows, rows[1:], []]
    assert [freed for _, freed, _ in given] == [["p"], ["a"], []]


def test_steps_are_counted_and_layers_are_wanted_in_sampled_ones(
    recorder: Recorder,
) -> None:
    wanted = []
    for number in range(1, 7):
        recorder.begin_step(tensors())
        assert recorder.step == number
        wanted.append(recorder.wants_layers)
        if number == 2:
            attend(recorder)  # its layer is known from now on
    assert wanted == [True, True, False, False, True, False]
    assert recorder.checked["steps"] == 6 and recorder.checked["sampled_steps"] == 2
    assert recorder.is_on and not recorder.findings


def test_metadata_of_another_group_are_of_the_same_step(recorder: Recorder) -> None:
    for group in ("layers", "others", "layers", "others"):
        recorder.begin_step(tensors(), group)
    assert recorder.step == recorder.checked["steps"] == 2


def test_replays_of_sampled_steps_have_rows_by_the_tokens_of_the_graph(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = noted(monkeypatch, recorder._graphs, "begin_replay")
    for _ in range(5):
        recorder.begin_step(tensors())
    assert begun == [(6, 1), (6, 5)]


@pytest.mark.parametrize("replays_graph", [True, False])
def test_the_buffers_of_a_step_that_replays_a_graph_are_compared(
    recorder: Recorder, replays_graph: bool
) -> None:
    recorder.begin_step(tensors(), replays_graph=replays_graph)
    found = [(finding.law, finding.request_id) for finding in recorder.findings]
    assert found == ([("graph buffers", None)] if replays_graph else [])
    paths = [path.name for path in recorder.settings.folder.glob("*.pt")]
    assert len(paths) == replays_graph and all("-step-1-" in path for path in paths)


def test_a_step_on_the_host_is_checked_when_it_begins(recorder: Recorder) -> None:
    recorder.begin_step(tensors(slot_mapping=torch.tensor([11, 12, 14, 32, -1, -1])))
    assert [finding.law for finding in recorder.findings] == ["slots"]


def test_the_last_step_is_finished_and_only_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = noted(monkeypatch, recorder._reports, "log_progress")
    recorder.finish()
    assert logged == []
    recorder.begin_step(tensors())
    checks = noted(monkeypatch, recorder._steps, "check_all")
    recorder.finish()
    recorder.finish()
    assert len(checks) == 1 and logged == [(recorder.checked,)]


def test_a_replay_without_a_step_or_tokens_is_not_compared(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = noted(monkeypatch, recorder._samples, "compare_replay")
    copies = [SimpleNamespace(group=name) for name in ("none", "layers")]
    monkeypatch.setattr(recorder._graphs, "replayed", lambda: copies)
    recorder.begin_step(tensors())
    recorder.finish()
    assert [replay.group for replay, _ in compared] == ["layers"] and recorder.is_on
    for _ in range(4):
        recorder.begin_step(tensors(query_start_loc=torch.zeros(3, dtype=torch.int64)))
    recorder.finish()
    assert len(compared) == 1 and recorder.is_on and recorder.step == 5


# layers


def test_nothing_of_a_layer_is_compared_before_the_first_step(
    recorder: Recorder,
) -> None:
    write(recorder)
    attend(recorder)
    assert recorder.is_on and recorder.checked["writes"] == 0
    empty = torch.zeros(3, dtype=torch.int64), torch.full((6,), -1)
    recorder.begin_step(tensors(query_start_loc=empty[0], slot_mapping=empty[1]))
    write(recorder)
    attend(recorder)
    assert recorder.is_on and recorder.checked["writes"] == 0
    assert not recorder.findings


@pytest.mark.parametrize("value", [1.0, None])
def test_a_wrong_write_of_the_layers_turn_is_found(
    recorder: Recorder, value: float | None
) -> None:
    """A layer that gives keys alone writes nothing."""
    recorder._samples.layers = ["b", "a"]  # step 5 is the second turn
    for number in range(1, 6):
        recorder.begin_step(tensors())
        write(recorder, "a", value, scales=None)
        is_found = value is not None and number == 5
        assert [finding.law for finding in recorder.findings] == [
            "cache write"
        ] * is_found
    assert recorder.is_on


def test_scales_and_the_implementation_reach_the_comparison(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.implementation = "TRITON"
    writes = noted(monkeypatch, recorder._samples, "compare_write")
    calls = noted(monkeypatch, recorder._samples, "compare_attention")
    recorder.begin_step(tensors())
    write(recorder, scales={"k_scale": 2.0})
    query_scale, query_rope = torch.ones(1), torch.zeros(6, 1, 2)
    attend(recorder, query_scale=query_scale, query_rope=query_rope)
    assert writes[0][0].scales == {"k_scale": 2.0}
    call = calls[0][0]
    assert call.implementation == "TRITON"
    assert call.query_scale is query_scale and call.query_rope is query_rope


def test_layers_are_not_compared_where_they_are_not_wanted(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = noted(monkeypatch, recorder, "_wrote")
    attended = noted(monkeypatch, recorder, "_attended")
    recorder.wants_layers = False
    write(recorder)
    attend(recorder)
    assert not wrote and not attended


def test_the_number_of_blocks_is_that_of_the_layers_cache(recorder: Recorder) -> None:
    attend(recorder, group="b")
    assert recorder._steps.num_blocks == {"b": 10}


def test_layers_of_a_capture_are_copied_and_not_compared(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = noted(monkeypatch, recorder._graphs, "capture_write")
    calls = noted(monkeypatch, recorder._graphs, "capture")
    compared = [
        noted(monkeypatch, recorder._samples, name)
        for name in ("compare_write", "compare_attention")
    ]
    recorder.begin_step(tensors())
    recorder.wants_layers = False
    recorder.begin_capture(tensors(), "b")
    assert recorder.wants_layers
    assert recorder._graphs._prepared[6].addresses.keys() == {"b"}
    with capturing(monkeypatch):
        write(recorder)
        attend(recorder, group="b")
        attend(recorder)
        recorder.begin_step(tensors())
    assert len(copied) == 1 and [group for _, group in calls] == ["b", "layers"]
    assert compared == [[], []] and recorder.step == 1


def test_whether_a_graph_is_captured_is_not_asked_of_the_driver(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = noted(monkeypatch, torch.cuda, "is_available")
    assert not recorder.is_capturing and not asked
