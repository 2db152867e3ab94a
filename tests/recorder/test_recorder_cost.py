"""What the recorder costs: waits for the device, and work per request on the host."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import Recorder, RecorderSettings
from pagetwin.recorder.laws import bookkeeping
from pagetwin.recorder.laws.attention import RecordedCall, check_attention
from pagetwin.recorder.laws.bookkeeping import LAWS, LAWS_OF_ROWS
from pagetwin.recorder.laws.scheduled_rows import ScheduledRow, ScheduledRows
from pagetwin.recorder.samples import unvalidated
from pagetwin.recorder.step import StepCopy, StepTensors
from recorded_graph import CapturedSteps, captured_recorder
from recorder_parts import requests
from small_engine import EngineSettings, SmallEngine
from support.second_device import DEVICE, OnDevice, SecondDevice

BLOCK = 16


def one_step(reqs: int, seq_len: int, new: int) -> tuple[StepTensors, dict[str, Any]]:
    """Return a step's metadata on the host, and a layer's tensors on the second device."""
    run = load_implementation("reference")
    width = -(-seq_len // BLOCK)
    table = torch.randperm(reqs * width).view(reqs, width).to(torch.int32)
    token = torch.arange(reqs * new)
    position = seq_len - new + token % new
    blocks = table[token // new, position // BLOCK].long()
    step = StepTensors(
        query_start_loc=torch.arange(reqs + 1, dtype=torch.int32) * new,
        seq_lens=torch.full((reqs,), seq_len, dtype=torch.int32),
        block_table=table,
        slot_mapping=blocks * BLOCK + position % BLOCK,
        max_query_len=new,
        max_seq_len=seq_len,
        block_size=BLOCK,
    )
    caches = torch.randn(2, reqs * width, BLOCK, 2, 16).unbind()
    key, value = torch.randn(2, reqs * new, 2, 16)
    query = torch.randn(reqs * new, 4, 16)
    run.reshape_and_cache(key, value, *caches, step.slot_mapping)
    metadata = (step.block_table, step.query_start_loc, step.seq_lens)
    output = run.paged_attention(query, *caches, *metadata, new, seq_len)
    names = ("query", "key", "value", "output", "key_cache", "value_cache")
    tensors = (query, key, value, output, *caches)
    return step, dict(zip(names, map(OnDevice, tensors), strict=True))


def test_a_graph_gets_five_small_kernels_whatever_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for is_captured in (False, True):
        recorder, graph = captured_recorder(tmp_path, monkeypatch, rows=4)
        if not is_captured:
            monkeypatch.setattr(recorder, "begin_capture", lambda tensors: None)
        CapturedSteps(recorder, graph, layers=3)
        names = [str(function) for function, *_ in graph._calls]
        counts.append(Counter(name for name in names if name.startswith("aten.")))
    assert counts[1] - counts[0] == {
        "aten.index_select.default": 4,
        "aten.add_.Tensor": 1,
    }


@pytest.mark.parametrize("new", [1, 24], ids=["decodes", "prefills"])
def test_only_sampled_steps_make_the_host_wait_and_those_a_few_times(
    tmp_path: Path, new: int
) -> None:
    """Validations of the reference read metadata of the device: 43 reads per sampled step."""
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=2))
    tensors, given = one_step(6, 40, new)
    caches = (given["key_cache"], given["value_cache"])
    reads = []
    for _ in range(4):
        with SecondDevice() as device:
            recorder.begin_step(tensors)
            recorder.wrote("layer", given["key"], given["value"], *caches)
            recorder.attended(
                "layer",
                given["query"],
                given["output"],
                *caches,
                None,
                AttentionOptions(),
            )
            recorder.finish()
        reads.append(sum(device.reads.values()))
    assert given["query"].device == DEVICE
    assert recorder.is_on and recorder.findings == []
    assert recorder.checked["sampled_steps"] == 2 and recorder.checked["rows"] == 8
    assert reads[1] == reads[3] == 0
    # the second sampled step also compares keys and values of four watched blocks
    assert 0 < reads[0] <= 16 and reads[0] < reads[2] <= 16 + 8


def test_right_rows_are_computed_once_and_others_are_judged_by_their_budget() -> None:
    """The smallest budget needs the exact result alone, and right rows are within it."""
    torch.manual_seed(0)
    tensors, given = one_step(6, 40, 1)
    given = {name: sample.numbers for name, sample in given.items()}
    host = StepCopy(tensors, 1, "layers").wait(None)
    types: list[Any] = []

    def paged_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        types.append(kwargs["compute_dtype"])
        return unvalidated("paged_attention")(*args, **kwargs)

    caches = (given["key_cache"], given["value_cache"])
    # the second error is above the smallest budget, 8 roundings, and within that of the rows
    roundings = torch.finfo(torch.float32).eps * given["output"].abs().amax((1, 2))
    for error, computed, is_right in (
        (0 * roundings, 1, True),
        (10 * roundings, 3, True),
        (1000 * roundings, 3, False),
    ):
        output = given["output"] + error[:, None, None]
        call = RecordedCall(
            "layer", given["query"], output, *caches, None, AttentionOptions(), ""
        )
        types.clear()
        finding = check_attention(call, host, range(6), paged_attention)
        assert (finding is None) == is_right
        assert len(types) == computed and types[0] == torch.float64


@pytest.mark.extended
def test_rows_that_the_scheduler_gave_are_compared_with_it_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def check_again(_: Any) -> None:
        raise AssertionError("a law that follows from the scheduler's rows is checked")

    laws = [check_again if law in LAWS_OF_ROWS else law for law in LAWS]
    monkeypatch.setattr(bookkeeping, "LAWS", tuple(laws))
    monkeypatch.setattr(bookkeeping, "LAWS_OF_ROWS", (check_again,))
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=8))
    engine = SmallEngine(EngineSettings(), recorder)
    engine.add(requests(12))
    engine.run_to_the_end()
    assert recorder.is_on and recorder.findings == []
    # without a scheduler they are checked
    recorder.begin_step(one_step(2, 40, 1)[0])
    assert (
        not recorder.is_on and "that follows from the scheduler's rows" in caplog.text
    )


@pytest.mark.parametrize("block", [-1, 99])
def test_a_block_outside_of_the_cache_is_found_although_the_scheduler_gave_it(
    tmp_path: Path, block: int
) -> None:
    tensors, given = one_step(2, 40, 1)
    tensors.block_table[1, 0] = block
    names = ("key", "value", "key_cache", "value_cache")
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=2))
    for number in range(2):  # the first step shows the size of the cache
        rows = [
            ScheduledRow(name, 39, 1, tuple(blocks))
            for name, blocks in zip("ab", tensors.block_table.tolist(), strict=True)
        ]
        recorder.schedule(rows, BLOCK)
        recorder.begin_step(tensors)
        if not number:
            recorder.wrote("layer", *(given[name].numbers for name in names))
    recorder.finish()
    assert recorder.is_on
    assert [finding.law for finding in recorder.findings] == ["block ids"]


@pytest.mark.parametrize("slot", [-2, 2 * 3 * BLOCK])
def test_a_slot_outside_of_the_cache_is_found_and_no_write_is_looked_for_there(
    tmp_path: Path, slot: int
) -> None:
    """On a GPU an index that is out of range would end the engine's process."""
    tensors, given = one_step(2, 40, 1)
    tensors.slot_mapping[1] = slot
    names = ("key", "value", "key_cache", "value_cache")
    recorder = Recorder(RecorderSettings(tmp_path))
    recorder.begin_step(tensors)
    recorder.wrote("layer", *(given[name].numbers for name in names))
    recorder.finish()
    assert recorder.is_on and recorder.checked["writes"] == 1
    assert [finding.law for finding in recorder.findings] == ["slots"]


@pytest.mark.extended
def test_rows_of_right_steps_are_compared_as_one_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a request joined or left, all rows were converted one by one: 5 ms for 256
    requests of 8,192 keys."""

    def one_by_one(*_: Any) -> None:
        raise AssertionError("rows are compared one by one")

    monkeypatch.setattr(ScheduledRows, "_match_each", one_by_one)
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=8))
    engine = SmallEngine(EngineSettings(), recorder)
    engine.add(requests(40))
    engine.run_to_the_end()
    assert engine.preemptions > 5
    assert recorder.is_on and recorder.findings == []


def test_the_line_of_a_request_that_left_is_kept_until_its_step_was_checked(
    tmp_path: Path,
) -> None:
    """On CUDA a step is checked after the scheduler has decided about the next one."""
    recorder = Recorder(RecorderSettings(tmp_path))
    tensors, _ = one_step(2, 40, 1)
    steps = recorder._steps
    rows = [
        ScheduledRow(name, 39, 1, blocks)
        for name, blocks in zip("ab", tensors.block_table.tolist(), strict=True)
    ]
    recorder.schedule(rows, BLOCK)
    steps.begin(tensors, 1, "layers")  # without checking it
    recorder.schedule([ScheduledRow("c", 0, 1, [0])], BLOCK, freed=["a", "b"])
    steps.check_all()
    assert recorder.is_on and recorder.findings == []
    assert sorted(steps._reports.names.values()) == ["a", "b"]


def test_requests_keep_their_names_if_the_batch_has_another_order(
    tmp_path: Path,
) -> None:
    """The order of the step before is tried first."""
    recorder = Recorder(RecorderSettings(tmp_path))
    tensors, _ = one_step(3, 40, 1)
    rows = [
        ScheduledRow(name, 39, 1, blocks)
        for name, blocks in zip("abc", tensors.block_table.tolist(), strict=True)
    ]

    def names(shown: list[int], slots_of: list[int]) -> list[Any]:
        recorder.schedule(rows, BLOCK)
        table, slots = tensors.block_table[shown], tensors.slot_mapping[slots_of]
        step = replace(tensors, block_table=table, slot_mapping=slots)
        recorder.begin_step(step)
        return [recorder._reports.names.get(row) for row in range(3)]

    assert names([0, 1, 2], [0, 1, 2]) == ["a", "b", "c"]
    assert names([2, 0, 1], [2, 0, 1]) == ["c", "a", "b"]
    assert names([2, 0, 1], [2, 0, 1]) == ["c", "a", "b"]
    assert recorder.is_on and recorder.findings == []
    # two rows are those of "b", in an order that was right before
    names([2, 1, 1], [2, 0, 1])
    [finding] = recorder.findings
    assert (finding.law, finding.row) == ("block table", 2)
