"""The recorder in captured steps, without a GPU: the checks of `tests/gpu/recorder.py`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import RecordedOperations, Recorder
from pagetwin.recorder.graphs import GraphSamples
from pagetwin.recorder.laws.attention import RecordedCall
from pagetwin.recorder.laws.cache import RecordedWrite
from pagetwin.recorder.reproduce import reproduce_case
from pagetwin.recorder.step import StepTensors
from recorded_graph import (
    FP8,
    REQUESTS,
    TOKENS,
    Call,
    CapturedSteps,
    captured_recorder,
    heads_first,
    next_slot,
    without_scales,
)
from simulated_graph import GraphOperations, SimulatedGraph

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
import recorder as script
from decode_steps import Decoder


def captured_decoder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Recorder, Decoder]:
    """Return a recorder, and a small decoder on the CPU that it checks in captured steps."""
    recorder, graph = captured_recorder(folder, monkeypatch, rows=2)
    run = GraphOperations(load_implementation("reference"), graph)

    def capture_step(step: object) -> SimulatedGraph:
        with graph:
            step()  # type: ignore[operator]
        return graph

    sizes = {"reqs": 2, "seq_len": 400, "layers": 1, "with_linear": False}
    recorded = RecordedOperations(run, recorder)
    return recorder, Decoder(recorded, **sizes, device="cpu", capture_step=capture_step)


@pytest.mark.extended
# the reference rejects two tokens with one slot
@pytest.mark.parametrize("fault", [fault for fault in script.FAULTS if fault != "slot"])
def test_each_fault_of_a_captured_step_is_found_in_its_step(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, model = captured_decoder(tmp_path, monkeypatch)
    first = script.replay(recorder, model, fault, due=17, steps=18)
    assert first == script.FAULTS[fault]
    cases = [path.name.split("-", 3)[3] for path in tmp_path.glob("*.pt")]
    expected = f"step-17-{first.replace(' ', '-')}.pt"
    assert expected in cases if fault else not cases
    assert recorder.checked["rows"] == recorder.checked["writes"] == 18 * 2


def one_block_step() -> StepTensors:
    """Return metadata of three requests of one token each."""
    starts, lens = torch.arange(4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    table = torch.zeros(3, 1, dtype=torch.int32)
    return StepTensors(starts, lens, table, torch.arange(3), 1, 1, 16)


def test_a_graph_copies_rows_of_fp8_queries_with_their_scale() -> None:
    samples = GraphSamples(2)
    samples.prepare(one_block_step())
    query = (torch.arange(24.0) % 13).view(3, 2, 4)
    cache = torch.zeros(1, 16, 2, 4)
    call = RecordedCall(
        layer="a",
        query=query.to(torch.float8_e4m3fn),
        output=query.bfloat16(),
        key_cache=cache,
        value_cache=cache,
        scale=None,
        options=AttentionOptions(),
        implementation="FLASH_ATTN",
        query_scale=torch.tensor(0.5),
    )
    [graph] = samples._prepared.values()
    graph.rows.copy_(torch.tensor([2, 0]))
    samples.capture(call, "layers")
    copied = graph.call
    assert copied is not None and copied.query_scale is call.query_scale
    assert copied.query.dtype == torch.float8_e4m3fn
    assert torch.equal(copied.query.float(), query[[2, 0]])
    assert torch.equal(copied.output.float(), query[[2, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=["float32", "fp8"])
# tokens 0 to 3 in each step; or 1 and 3, 0 and 2, 1 and 3. Token 3 is padding
@pytest.mark.parametrize(("rows", "compared"), [(4, 3 + 3 + 3), (2, 1 + 2 + 1)])
def test_cache_writes_of_right_replays_are_compared(
    dtype: torch.dtype,
    rows: int,
    compared: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers have their keys in one buffer, so what is compared is a copy of it."""
    recorder, graph = captured_recorder(tmp_path, monkeypatch, rows)
    steps = CapturedSteps(recorder, graph, layers=2, cache_dtype=dtype)
    for _ in range(3):
        steps.step()
    recorder.finish()
    assert recorder.is_on and recorder.findings == []
    assert recorder.checked["writes"] == recorder.checked["rows"] == compared


@pytest.mark.parametrize(
    ("change", "dtype", "side"),
    [
        (without_scales, FP8, "key"),
        (heads_first, torch.float32, "value"),
        (next_slot, torch.float32, "key"),
    ],
)
def test_a_wrong_write_in_a_graph_is_found_in_its_step(
    change: Callable[[Call], Call],
    dtype: torch.dtype,
    side: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder, graph = captured_recorder(tmp_path, monkeypatch, rows=4)
    steps = CapturedSteps(recorder, graph, cache_dtype=dtype)
    for number in range(1, 4):
        if number == 3:
            steps.operations.change = change
        steps.step()
        assert recorder.findings == []
    recorder.finish()
    assert recorder.is_on and recorder.findings[0].law == "cache write"
    # block 2, offset 3: the request had 5 tokens before the first step
    expected = (
        f"step 3, request 'a': cache write: layer 0: the {side} at position 7 (slot 11)"
    )
    assert expected in caplog.text
    [path] = tmp_path.glob("*-step-3-cache-write.pt")
    again = reproduce_case(path)
    assert again.still is not None and again.still.law == "cache write"


def test_a_slot_that_the_next_step_writes_again_is_compared_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, graph = captured_recorder(tmp_path, monkeypatch, rows=4)
    steps = CapturedSteps(recorder, graph)
    for _ in range(3):
        # as after draft tokens that were rejected
        steps.lens = [5, 9, 6]
        steps.step()
    recorder.finish()
    assert recorder.is_on and recorder.findings == []
    assert recorder.checked["writes"] == 3 * REQUESTS


@pytest.mark.parametrize("told", ["before the step", "after the step"])
def test_a_block_that_the_engine_fills_after_the_step_is_not_compared(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may leave after a step, and its block be filled before the step is checked."""
    recorder, graph = captured_recorder(tmp_path, monkeypatch, rows=4)
    steps = CapturedSteps(recorder, graph)
    block = steps.blocks[1][2]
    if told == "before the step":
        recorder.blocks_changed([block])
    steps.step()
    if told == "after the step":
        recorder.blocks_changed([block])
        for cache in steps.caches[0]:
            cache[block] = 3.0
    recorder.finish()
    assert recorder.is_on and recorder.findings == []
    kept = REQUESTS - (told == "after the step")
    assert recorder.checked["writes"] == recorder.checked["rows"] == kept


def test_a_token_without_a_slot_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unstored(CapturedSteps):
        def tensors(self) -> StepTensors:
            self.slots[1] = -1
            return replace(super().tensors(), stores_all=False)

    recorder, graph = captured_recorder(tmp_path, monkeypatch, rows=4)
    steps = Unstored(recorder, graph)
    for _ in range(2):
        steps.step()
    recorder.finish()
    assert recorder.is_on and recorder.findings == []
    assert recorder.checked["writes"] == 2 * (REQUESTS - 1)
    assert recorder.checked["rows"] == 2 * REQUESTS


@pytest.mark.parametrize("turn", [0, 1])
def test_no_write_of_a_layer_that_shares_a_cache_is_compared(
    turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first graph copies rows of the first layer, and the second one rows of the second."""
    recorder, graph = captured_recorder(tmp_path, monkeypatch, rows=4)
    prepare = GraphSamples.prepare

    def prepare_turn(self: GraphSamples, *given: Any) -> None:
        prepare(self, *given)
        self._prepared[TOKENS].turn = turn

    monkeypatch.setattr(GraphSamples, "prepare", prepare_turn)
    steps = CapturedSteps(recorder, graph, layers=3, shared=(1,))
    for _ in range(2):
        steps.step()
    recorder.finish()
    assert recorder.is_on and recorder.findings == []
    assert recorder.checked["rows"] == 2 * REQUESTS
    assert recorder.checked["writes"] == (0 if turn else 2 * REQUESTS)


def test_a_write_is_kept_only_with_the_attention_of_its_layer() -> None:
    samples = GraphSamples(2)
    samples.prepare(one_block_step())
    tensor, cache = torch.zeros(3, 2, 4), torch.zeros(1, 16, 2, 4)
    [graph] = samples._prepared.values()
    samples.capture_write(RecordedWrite("a", tensor, tensor, cache, cache, {}))
    assert graph.write is not None and graph.write.key.shape[0] == 2
    call = RecordedCall(
        "b", tensor, tensor, cache, cache, None, AttentionOptions(), "FLASH_ATTN"
    )
    samples.capture(call, "layers")
    assert graph.call is not None and graph.write is None
