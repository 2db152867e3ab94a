"""The recorder: planted bugs are found in their step, and clean engines raise nothing."""

import inspect
import logging
import re
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.operations import Implementation, load_implementation
from pagetwin.contract.scheduler_classes import Request
from pagetwin.recorder import (
    CorruptionFound,
    RecordedOperations,
    Recorder,
    RecorderSettings,
    recorder_from_environment,
    steps,
)
from pagetwin.recorder.case import load_case
from pagetwin.recorder.laws.attention import RecordedCall, check_attention
from pagetwin.recorder.reproduce import reproduce_case
from pagetwin.recorder.samples import unvalidated
from pagetwin.recorder.step import StepCopy, StepTensors, step_tensors
from pagetwin.tools.cli import app
from pagetwin.tools.replay.mismatch import TwinMismatch
from pagetwin.tools.replay.run import Replay
from pagetwin.tools.replay.settings import choose_settings
from recorder_parts import requests
from small_engine import EngineSettings, SmallEngine
from torch.multiprocessing.reductions import StorageWeakRef
from typer.testing import CliRunner

REFERENCE = load_implementation("reference")
BUG_FROM = 20


def recorded_engine(folder: Path, every: int = 1, **given: Any) -> SmallEngine:
    """Return an engine with requests and a recorder."""
    recorder = Recorder(RecorderSettings(folder, sample_every=every))
    engine = SmallEngine(EngineSettings(bug_from=BUG_FROM, **given), recorder)
    engine.add(requests(40))
    return engine


def found(recorder: Recorder) -> list[str]:
    return [finding.law for finding in recorder.findings]


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"))


@pytest.mark.extended
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("window", [None, 6])
def test_a_clean_engine_with_preemptions_and_prefix_hits_raises_nothing(
    tmp_path: Path, cache_dtype: str, window: int | None
) -> None:
    engine = recorded_engine(tmp_path, cache_dtype=cache_dtype, window=window)
    engine.run_to_the_end()
    checked = engine.recorder.checked
    assert engine.recorder.is_on and found(engine.recorder) == []
    assert engine.preemptions > 5
    assert checked["steps"] == checked["sampled_steps"] == engine.steps
    assert min(checked["writes"], checked["rows"], checked["blocks"]) > 100
    assert stored(tmp_path) == []


BUGS = {
    "padded row": ({}, "padding", "padded row 5 has slot 0"),
    "stale row": ({}, "block table", "which the scheduler gave it"),
    "freed block": ({}, "block ownership", "was given to request"),
    "fp8 scale": ({"cache_dtype": "fp8"}, "attention", "expected at most"),
    "window": ({"window": 6}, "attention", "expected at most"),
    "layout": ({}, "cache write", "in the cache: expected"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_in_its_first_step_and_named_with_its_request(
    tmp_path: Path, bug: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, law, words = BUGS[bug]
    engine = recorded_engine(tmp_path, bug=bug, **given)
    with caplog.at_level(logging.ERROR, logger="pagetwin.recorder"):
        while not engine.recorder.findings:
            # the reference rejects some of the wrong metadata, after the recorder has seen them
            with suppress(ValueError):
                engine.step()
    assert engine.steps == engine.first_wrong
    assert found(engine.recorder)[0] == law
    sentence = caplog.messages[0]
    # a padded row belongs to no request
    whose = "" if bug == "padded row" else ", request 'r"
    assert sentence.startswith(f"flight recorder: step {engine.first_wrong}{whose}")
    assert words in sentence
    assert engine.recorder.is_on
    case = load_case(stored(tmp_path)[0])
    assert sentence.startswith(f"flight recorder: {case.sentence}")


@pytest.mark.extended
@pytest.mark.parametrize("bug", BUGS)
def test_a_stored_case_is_reproduced_without_the_engine(
    tmp_path: Path, bug: str
) -> None:
    given, law, _ = BUGS[bug]
    engine = recorded_engine(tmp_path, bug=bug, **given)
    while not engine.recorder.findings:
        with suppress(ValueError):
            engine.step()
    (path,) = [file for file in stored(tmp_path) if law.replace(" ", "-") in file.name]
    result = reproduce_case(path)
    assert result.still is not None and result.still.law == law
    printed = CliRunner().invoke(app, ["reproduce", str(path)])
    assert printed.exit_code == 1, printed.output
    assert "The stored data violate the law." in printed.output


@pytest.mark.extended
def test_a_case_of_our_kernels_is_run_on_them_again(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, bug="window", window=6)
    while not engine.recorder.findings:
        engine.step()
    (path,) = stored(tmp_path)
    content = torch.load(path, weights_only=True)
    content["evidence"]["rows"]["implementation"] = "optimized"
    torch.save(content, path)
    result = reproduce_case(path)
    # the stored output is wrong, and that of the kernels is right
    assert result.still is not None and result.candidate_agrees
    printed = CliRunner().invoke(app, ["reproduce", str(path)])
    assert printed.exit_code == 0, printed.output
    assert "The implementation is right now." in printed.output


def test_a_bug_that_shows_in_sampled_steps_alone_is_found_at_the_next_one(
    tmp_path: Path,
) -> None:
    engine = recorded_engine(tmp_path, every=16, bug="window", window=6)
    while not engine.recorder.findings:
        engine.step()
    assert engine.steps == 33


def test_a_stray_write_to_a_full_block_is_found_by_its_content(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    layer = engine.layers["layers.0.attn"]
    for _ in range(120):
        before = len(engine.recorder._samples._watched)
        engine.step()
        if before and not engine.recorder.findings and engine.steps > BUG_FROM:
            for watched in engine.recorder._samples._next_watched:
                if watched.layer == "layers.0.attn":
                    layer.kv_cache[1, watched.block_id, 0] += 1
        if engine.recorder.findings:
            break
    assert found(engine.recorder)[0] == "unchanged blocks"
    result = reproduce_case(stored(tmp_path)[0])
    assert result.still is not None


def wrong(name: str, **operations: Any) -> dict[str, Implementation]:
    """Return the reference under another name, with some operations replaced."""
    module = types.ModuleType(name)
    vars(module).update(REFERENCE.operations | operations)
    return {name: Implementation(name, module)}


def heads_first(key: Any, value: Any, *caches: Any, **scales: Any) -> None:
    """Write blocks of [slots, heads, size] as if they were [heads, slots, size]."""
    *caches, slots = caches
    other = [
        cache.as_strided(
            cache.shape,
            (cache.stride(0), cache.shape[3], cache.shape[1] * cache.shape[3], 1),
            cache.storage_offset(),
        )
        for cache in caches
    ]
    REFERENCE.reshape_and_cache(key, value, *other, slots, **scales)


def test_the_replay_shows_a_wrong_layout_to_its_recorder(tmp_path: Path) -> None:
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=1))
    settings = choose_settings("cpu", requests=12, twins=("wrong",), head_size=8)
    replay = Replay(
        settings, wrong("wrong", reshape_and_cache=heads_first), recorder=recorder
    )
    with pytest.raises(TwinMismatch):
        list(replay.steps())
    assert found(recorder) == ["cache write"]
    assert recorder.step == 1


def test_the_replay_shows_a_stale_row_to_its_recorder(tmp_path: Path) -> None:
    """The metadata are consistent, so only the scheduler's rows show the bug."""
    steps = [0]

    def stale(**given: Any) -> CommonAttentionMetadata:
        steps[0] += 1
        given["block_rows"] = [list(row) for row in given["block_rows"]]
        if steps[0] == 9:
            given["block_rows"][0] = given["block_rows"][0][::-1]
        built: CommonAttentionMetadata = REFERENCE.build_common_attn_metadata(**given)
        return built

    recorder = Recorder(RecorderSettings(tmp_path))
    settings = choose_settings("cpu", requests=12, twins=("wrong",), head_size=8)
    replay = Replay(
        settings, wrong("wrong", build_common_attn_metadata=stale), recorder=recorder
    )
    with pytest.raises(TwinMismatch):
        list(replay.steps())
    assert found(recorder) == ["block table"]
    assert recorder.step == 9


@pytest.mark.sample(1)
@pytest.mark.parametrize("twins", [("reference",), ("optimized",), ("triton",)])
def test_a_replay_with_a_recorder_raises_nothing(
    tmp_path: Path, twins: tuple[str, ...], device: torch.device
) -> None:
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=4))
    short = {"scale": 1 / 128, "output_scale": 1 / 64}
    settings = choose_settings(device.type, requests=6, twins=twins, layers=2, **short)
    records = list(Replay(settings, recorder=recorder).steps())
    assert recorder.is_on and found(recorder) == []
    assert recorder.checked["steps"] == len(records)
    assert recorder.checked["rows"] > 4 and recorder.checked["blocks"] > 0


@pytest.mark.parametrize("drops", [False, True])
def test_float32_rows_with_large_scores_have_a_larger_budget(drops: bool) -> None:
    """Two of these rows had up to 1.25 times the budget without the term of the scores."""
    wrong = []
    for seed in (30, 36, 42):
        generator = torch.Generator().manual_seed(seed)
        cache, values = (torch.randn(7, 16, 2, 64, generator=generator) for _ in "kv")
        query = torch.randn(1, 4, 64, generator=generator) * 8
        key, value = (
            states.flatten(0, 1)[:109].repeat_interleave(2, 1)
            for states in (cache, values)
        )
        # a correct sum in another order than that of torch
        score = torch.zeros(4, 109)
        for element in reversed(range(64)):
            score += query[0, :, element, None] / 8 * key[:, :, element].T
        weights = (score - score.amax(1, keepdim=True)).exp()
        if drops:
            weights[:, weights.sum(0).argmax()] = 0
        out = torch.zeros(4, 64)
        for index in range(109):
            out += weights[:, index, None] * value[index]
        common = REFERENCE.build_common_attn_metadata([1], [108], [[*range(7)]], 16)
        call = RecordedCall(
            *("a", query, (out / weights.sum(1, keepdim=True))[None], cache, values),
            *(None, AttentionOptions(), ""),
        )
        step = StepCopy(step_tensors(common, 16), 1, "layers").wait(None)
        run = unvalidated("paged_attention")
        wrong.append(check_attention(call, step, [0], run) is not None)
    assert wrong == [drops] * 3


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["output", "query", "key", "value"])
def test_a_row_that_is_not_finite_is_described_without_an_error_of_nan(
    place: str, number: float
) -> None:
    """The sentence names the input that is not finite, if there is one."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 4, 1, 8, generator=generator) for _ in "kv")
    query = torch.randn(1, 2, 8, generator=generator)
    output = torch.zeros(1, 2, 8)
    {"output": output, "query": query, "key": keys[1, :1], "value": values[1, :1]}[
        place
    ][0] = number
    common = REFERENCE.build_common_attn_metadata([1], [6], [[0, 1]], 4)
    call = RecordedCall(
        *("a", query, output, keys, values, None, AttentionOptions(), "")
    )
    step = StepCopy(step_tensors(common, 4), 1, "layers").wait(None)
    finding = check_attention(call, step, [0], unvalidated("paged_attention"))
    assert finding is not None
    reason = {
        "output": "is not finite",
        "query": "because of its query",
        "key": "because of the key of position 4",
        "value": "because of the value of position 4",
    }[place]
    assert reason in finding.found, finding.found
    assert "error" not in finding.found and "at most" not in finding.found


OF_LARGE_SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 12},
    "chunk": {"attention_chunk_size": 9},
    "cap": {"logits_soft_cap": 50.0},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 1.0])},
    "bias": {"position_bias": torch.randn(2, 9)},
    "sinks": {"sinks": torch.tensor([5e7, -1e8])},
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", OF_LARGE_SCORES)
@pytest.mark.parametrize("needle", [None, 28])
def test_rows_of_large_scores_that_are_wrong_are_found(
    needle: int | None, kind: str, dtype: torch.dtype
) -> None:
    """Scores of 1e8: the weights of equal keys sum to 1, and a needle has all of the weight."""
    cache, values = torch.zeros(3, 16, 1, 8), torch.ones(3, 16, 1, 8)
    cache[..., 0] = 1e4
    if needle is not None:
        cache[..., 0] /= 2
        cache.flatten(0, 1)[needle, 0, 0] = 1e4
        values = torch.randn(3, 16, 1, 8)
    query = torch.zeros(1, 2, 8)
    query[..., 0] = 1e4
    options = AttentionOptions(**OF_LARGE_SCORES[kind])
    tensors = [tensor.to(dtype) for tensor in (query, cache, values)]
    common = REFERENCE.build_common_attn_metadata([1], [30], [[0, 1, 2]], 16)
    step = StepCopy(step_tensors(common, 16), 1, "layers").wait(None)
    run = unvalidated("paged_attention")
    right = REFERENCE.paged_attention(
        *tensors,
        common.block_table_tensor, common.query_start_loc, common.seq_lens, 1, 31,
        scale=1.0, options=options,
    )  # fmt: skip
    found = []
    for out in (right, right + 0.1, 6 * right):
        call = RecordedCall("a", tensors[0], out, *tensors[1:], 1.0, options, "")
        found.append(check_attention(call, step, [0], run) is not None)
    assert found == [False, True, True]


def test_nothing_is_read_while_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "is_capturing", True)
    monkeypatch.setattr(torch.Tensor, "numpy", _fail)
    monkeypatch.setattr(torch.Tensor, "item", _fail)
    monkeypatch.setattr(torch.Tensor, "tolist", _fail)
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=1))
    cache = torch.zeros(4, 4, 1, 8)
    tensors = StepTensors(
        *(torch.zeros(2, dtype=torch.int32) for _ in range(2)),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        1,
        1,
        4,
    )
    recorder.begin_capture(tensors)
    recorder.begin_step(tensors)
    key = torch.zeros(1, 1, 8)
    recorder.wrote("layer", key, key, cache, cache)
    recorder.attended("layer", key, key, cache, cache, None, DEFAULT_OPTIONS)
    assert recorder.is_on and recorder.step == 0


def _fail(*_args: Any) -> None:
    raise AssertionError("the host was made to wait for the device")


@pytest.mark.extended
def test_an_error_of_the_recorder_is_logged_once_and_the_engine_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = recorded_engine(tmp_path)
    plain = SmallEngine(EngineSettings())
    plain.add(requests(40))
    monkeypatch.setattr(steps, "check_step", _fail)
    with caplog.at_level(logging.ERROR, logger="pagetwin.recorder"):
        engine.run_to_the_end()
    plain.run_to_the_end()
    assert not engine.recorder.is_on
    assert engine.steps == plain.steps
    assert len(caplog.messages) == 1 and "is off from now on" in caplog.messages[0]


def test_a_recorder_says_that_it_is_on_and_what_it_has_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was logged in an engine without a violation, as in one without a recorder."""
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    monkeypatch.setenv("PAGETWIN_RECORD_EVERY", "4")
    caplog.set_level(logging.INFO, logger="pagetwin.recorder")
    recorder = recorder_from_environment()
    assert recorder is not None and caplog.messages == []
    engine = SmallEngine(EngineSettings(), recorder)
    assert caplog.messages == [
        "flight recorder: on, cases are stored in"
        f" {tmp_path}; every step is checked, and one of 4 is sampled"
    ]
    caplog.clear()
    engine.add(requests(40))
    for _ in range(24):
        engine.step()
    recorder.finish()
    # sampled steps 1, 2 and 4 of the six
    assert [message.split(";")[0] for message in caplog.messages] == [
        f"flight recorder: steps checked: {steps}, sampled: {sampled}"
        for steps, sampled in ((1, 1), (5, 2), (13, 4))
    ]
    checked = r"cache writes \d+, rows of attention \d+, blocks \d+; violations: 0$"
    assert all(re.search(checked, message) for message in caplog.messages)


@pytest.mark.extended
def test_a_recorder_that_shall_stop_the_engine_raises(tmp_path: Path) -> None:
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=1, action="stop"))
    engine = SmallEngine(EngineSettings(bug="window", window=6), recorder)
    engine.add(requests(40))
    with pytest.raises(CorruptionFound, match="step 20, request 'r") as raised:
        engine.run_to_the_end()
    assert raised.value.path == stored(tmp_path)[0]


@pytest.mark.extended
def test_the_caches_of_a_closed_engine_are_freed_and_the_next_one_is_checked(
    tmp_path: Path,
) -> None:
    """Watched blocks held the whole cache of an engine that was gone."""
    engine = recorded_engine(tmp_path, every=4)
    recorder = engine.recorder
    for _ in range(BUG_FROM):
        engine.step()
    storage = StorageWeakRef(
        engine.layers["layers.0.attn"].kv_cache[0].untyped_storage()
    )
    del engine
    assert not storage.expired()
    recorder.engine_ended()
    assert storage.expired()
    other = SmallEngine(EngineSettings(bug_from=BUG_FROM, bug="stale row"), recorder)
    other.add(requests(40))
    # the reference rejects the slots that a stale row gives to two tokens
    with suppress(ValueError):
        other.run_to_the_end()
    assert found(recorder) == ["block table"]


def test_layers_are_wrapped_if_the_environment_says_so_and_not_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SmallEngine(EngineSettings())
    backends = {layer.attn_backend for layer in engine.layers.values()}
    assert backends == set(REFERENCE.backends)
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    engine = SmallEngine(EngineSettings())
    (backend,) = {layer.attn_backend for layer in engine.layers.values()}
    engine.builder = backend.get_builder_cls()(
        engine.builder.kv_cache_spec, list(engine.layers), "cpu"
    )
    engine.add(requests(8))
    engine.run_to_the_end()
    backend.recorder.finish()
    assert backend.recorder.checked["steps"] == engine.steps
    assert backend.recorder.checked["rows"] > 0 and found(backend.recorder) == []


@pytest.mark.parametrize("content", [b"", b"no case", None])
def test_a_damaged_or_missing_case_is_one_sentence(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "pagetwin-record-1-step-1-attention.pt"
    if content is not None:
        path.write_bytes(content)
    printed = CliRunner().invoke(app, ["reproduce", str(path)])
    assert printed.exit_code == 2
    expected = "expected a .pt file" if content is None else "expected a file"
    assert expected in printed.output


@pytest.mark.extended
def test_a_case_holds_no_token_ids(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, bug="window", window=6)
    engine.run_to_the_end(40)
    content = torch.load(stored(tmp_path)[0], weights_only=True)
    assert set(content) == {
        "format",
        "law",
        "found",
        "row",
        "request_id",
        "evidence",
        "sentence",
        "number",
        "versions",
        "step",
        "ring",
    }
    assert set(content["evidence"]) == {"kind", "rows"}
    assert len(content["ring"]) == 15


@pytest.mark.extended
def test_two_engines_in_one_process_have_recorders_of_their_own(tmp_path: Path) -> None:
    clean = recorded_engine(tmp_path / "clean")
    broken = recorded_engine(tmp_path / "broken", bug="layout")
    for _ in range(BUG_FROM + 1):
        clean.step()
        broken.step()
    assert found(clean.recorder) == []
    assert found(broken.recorder) == ["cache write"]


def test_recorded_operations_are_those_of_the_implementation(tmp_path: Path) -> None:
    run = RecordedOperations(REFERENCE, Recorder(RecorderSettings(tmp_path)))
    assert run.name == "reference"
    assert run.gather_cache is REFERENCE.gather_cache


@pytest.mark.long
def test_ten_thousand_clean_steps_raise_nothing(tmp_path: Path) -> None:
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=4))
    engine = SmallEngine(EngineSettings(), recorder)
    seed = 0
    while engine.steps < 10_000:
        if len(engine.scheduler.waiting) < 8:
            seed += 1
            engine.add(
                [
                    Request(
                        f"{seed}-{request.request_id}",
                        request.token_ids,
                        request.max_tokens,
                    )
                    for request in requests(40, seed)
                ]
            )
        engine.step()
    recorder.finish()
    assert recorder.is_on and found(recorder) == []
    assert recorder.checked["steps"] == 10_000
    assert engine.preemptions > 1000


def test_a_recorded_write_takes_every_argument_of_the_operation() -> None:
    """A new argument of the operation once had no place in the recorded one."""
    names = [
        list(inspect.signature(write).parameters)
        for write in (RecordedOperations.reshape_and_cache, REFERENCE.reshape_and_cache)
    ]
    assert names[0][1:] == names[1]
