"""The recorder that the environment asks for, its settings, guard, reports and end."""

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagetwin.contract.scheduler_classes import (
    Request,
    ScheduledRequest,
    SchedulerOutput,
)
from pagetwin.recorder import Recorder
from pagetwin.recorder.case import (
    describe_versions,
)
from pagetwin.recorder.environment import recorder_from_environment
from pagetwin.recorder.findings import Corruption, CorruptionFound
from pagetwin.recorder.guard import guarded
from pagetwin.recorder.settings import RecorderSettings, settings_from_environment
from recorder_parts import FOUND, ROWS, Guarded, reports, step, tensors

# what the environment asks for


def test_the_recorder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PAGETWIN_RECORD", raising=False)
    assert recorder_from_environment() is None and not caplog.messages
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path / "a" / "b"))
    found = recorder_from_environment("TRITON", 1)
    assert found is not None and (found.implementation, found._fp8_steps) == (
        "TRITON",
        1,
    )
    assert recorder_from_environment() is not None  # the folder exists now
    monkeypatch.setenv("PAGETWIN_RECORD_ROWS", "x")
    assert recorder_from_environment() is None
    monkeypatch.delenv("PAGETWIN_RECORD_ROWS")
    monkeypatch.setenv("PAGETWIN_RECORD", "/proc/none")
    assert recorder_from_environment() is None
    rows, folder = caplog.messages
    assert "nothing is recorded: PAGETWIN_RECORD_ROWS = 'x'" in rows
    assert "nothing is recorded: PAGETWIN_RECORD = /proc/none" in folder
    assert "(No such file or directory)" in folder


def test_each_variable_of_the_environment_is_a_setting() -> None:
    words = {"EVERY": "3", "ROWS": "5", "ACTION": "stop", "MAX_MIB": "7"}
    given = {f"PAGETWIN_RECORD_{name}": word for name, word in words.items()}
    found = settings_from_environment({"PAGETWIN_RECORD": "cases", **given})
    right = {"sample_every": 3, "rows": 5, "action": "stop", "max_mib": 7}
    assert found == RecorderSettings(Path("cases"), **right)
    assert settings_from_environment({"PAGETWIN_RECORD": ""}) is None
    given = {"PAGETWIN_RECORD": "cases", "PAGETWIN_RECORD_GRAPHS": "0"}
    found = settings_from_environment(given)
    assert found == RecorderSettings(Path("cases"), vllm_graphs=False)
    given = {"PAGETWIN_RECORD": "cases", "PAGETWIN_RECORD_GRAPHS": "1"}
    assert settings_from_environment(given) == RecorderSettings(Path("cases"))
    for name, text in (("ROWS", "²"), ("GRAPHS", "2"), ("MAX_MIB", "")):
        with pytest.raises(ValueError, match=f"PAGETWIN_RECORD_{name}"):
            settings_from_environment(given | {f"PAGETWIN_RECORD_{name}": text})


@pytest.mark.parametrize(
    "name", ["sample_every", "rows", "ring", "max_mib", "max_cases"]
)
def test_settings_begin_at_one(tmp_path: Path, name: str) -> None:
    """Except for the number of watched blocks, which may be 0."""
    RecorderSettings(tmp_path, watched_blocks=0)
    with pytest.raises(ValueError, match="watched_blocks = -1"):
        RecorderSettings(tmp_path, watched_blocks=-1)
    with pytest.raises(ValueError, match="action = 'go': expected continue or stop"):
        RecorderSettings(tmp_path, action="go")
    assert getattr(RecorderSettings(tmp_path, **{name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"{name} = 0: expected at least 1"):
        RecorderSettings(tmp_path, **{name: 0})


# the guard


def test_a_guarded_call_holds_the_lock_and_an_error_names_its_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, is_free = Guarded(), []

    def look() -> None:
        is_free.append(own._lock.acquire(blocking=False))

    class Looking(ValueError):
        def __str__(self) -> str:
            return "own"

    def run_elsewhere(self: Any, error: Any = None) -> int:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return len(is_free)

    assert guarded(run_elsewhere)(own) == 1 and is_free == [False]
    own.step = 4
    assert own.run(error=Looking()) is None
    (message,) = caplog.messages
    assert "it failed in step 4 and is off from now on (Looking: own)" in message
    assert caplog.records[0].levelno == logging.ERROR


# reports


def test_a_report_has_the_request_of_its_row_alone(tmp_path: Path) -> None:
    own = reports(tmp_path)
    own.names = {0: "a", 1: "b"}
    own.report(replace(FOUND, law="of a row", row=1), step(), 5)
    own.report(replace(FOUND, law="of none", row=None), step(), 5)
    own.report(replace(FOUND, law="named", request_id="c"), step(), 5)
    own.report(replace(FOUND, law="of the schedule"), None, 5)
    assert [finding.request_id for finding in own.findings] == ["b", None, "c", None]


def test_the_ring_and_the_cases_have_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def save(*args: Any) -> Path:
        given.append(args)
        return tmp_path

    monkeypatch.setattr("pagetwin.recorder.reports.save_case", save)
    own = reports(tmp_path, ring=2, max_cases=2, max_mib=3)
    steps = [step(number) for number in range(4)]
    own.ring.extend(steps)
    for law in "abc":
        own.report(Corruption(law, "wrong"), steps[3], 3)
    assert len(given) == 2 and {(folder, mib) for folder, _, mib in given} == {
        (tmp_path, 3)
    }
    case = given[0][1]
    assert case.ring == (steps[2],) and case.versions == describe_versions()
    stopping = reports(tmp_path, action="stop")
    with pytest.raises(CorruptionFound) as raised:
        stopping.report(FOUND, step(), 5)
    assert raised.value.path == tmp_path
    reports(tmp_path, action="continue").report(FOUND, step(), 5)


# the end of an engine


def test_an_engine_that_ends_is_forgotten_and_what_was_found_stays(
    tmp_path: Path,
) -> None:
    recorder = Recorder(RecorderSettings(tmp_path))
    recorder._reports.report(Corruption("slots", "wrong"), None, 1)
    scheduled = [
        ScheduledRequest(Request(row[0], [1], 2), row[1], row[2], 0, [*row[3]], True)
        for row in ROWS
    ]
    output = SchedulerOutput(scheduled)
    recorder.schedule_output(output, 4)
    recorder.begin_step(tensors())
    recorder.begin_capture(tensors())
    before = recorder._samples, recorder._steps, recorder._graphs
    recorder.engine_ended()
    now = recorder._samples, recorder._steps, recorder._graphs
    assert all(one is not other for one, other in zip(before, now, strict=True))
    assert not recorder._running and not recorder._engine_ended
    assert len(recorder.findings) == 1


@pytest.mark.parametrize("call", ["begin_step", "begin_capture"])
def test_an_engine_that_ends_inside_a_call_is_forgotten_at_the_next_one(
    tmp_path: Path, call: str
) -> None:
    recorder = Recorder(RecorderSettings(tmp_path))
    samples = recorder._samples
    recorder.own(recorder.engine_ended)
    assert recorder._samples is samples and recorder._engine_ended
    getattr(recorder, call)(tensors())
    assert recorder._samples is not samples and not recorder._engine_ended


def test_an_engine_that_ends_while_another_thread_records_does_not_wait(
    tmp_path: Path,
) -> None:
    recorder = Recorder(RecorderSettings(tmp_path))
    samples = recorder._samples
    end = threading.Thread(target=recorder.engine_ended, daemon=True)
    with recorder._lock:
        end.start()
        end.join(5.0)
        assert not end.is_alive() and recorder._engine_ended
    recorder.begin_step(tensors())
    assert recorder._samples is not samples


def test_the_lock_is_free_after_an_engine_has_ended(tmp_path: Path) -> None:
    recorder = Recorder(RecorderSettings(tmp_path))
    recorder.engine_ended()
    found: list[bool] = []
    other = threading.Thread(
        target=lambda: found.append(recorder._lock.acquire(blocking=False))
    )
    other.start()
    other.join()
    assert found == [True]
