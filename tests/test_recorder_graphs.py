"""The recorder in captured steps, without a GPU: the checks of `tests/gpu/recorder.py`."""

import sys
from pathlib import Path

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import RecordedOperations, Recorder, RecorderSettings
from pagetwin.recorder.graphs import GraphSamples
from pagetwin.recorder.laws.attention import RecordedCall
from pagetwin.recorder.step import StepTensors
from simulated_graph import GraphOperations, SimulatedGraph

sys.path.append(str(Path(__file__).parent / "gpu"))
import recorder as script
from decode_steps import Decoder


def captured_decoder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Recorder, Decoder]:
    """Return a recorder, and a small decoder on the CPU that it checks in captured steps."""
    graph = SimulatedGraph()
    capturing = property(lambda self: graph.is_capturing)
    monkeypatch.setattr(Recorder, "is_capturing", capturing)
    recorder = Recorder(RecorderSettings(folder, sample_every=1, rows=2))
    run = GraphOperations(load_implementation("reference"), graph)

    def capture_step(step: object) -> SimulatedGraph:
        with graph:
            step()  # type: ignore[operator]
        return graph

    sizes = {"reqs": 2, "seq_len": 400, "layers": 1, "with_linear": False}
    recorded = RecordedOperations(run, recorder)
    return recorder, Decoder(recorded, **sizes, device="cpu", capture_step=capture_step)


# the reference rejects two tokens with one slot
@pytest.mark.parametrize("fault", [each for each in script.FAULTS if each != "slot"])
def test_each_fault_of_a_captured_step_is_found_in_its_step(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, model = captured_decoder(tmp_path, monkeypatch)
    first = script.replay(recorder, model, fault, due=17, steps=18)
    assert first == script.FAULTS[fault]
    cases = [each.name.split("-", 3)[3] for each in tmp_path.glob("*.pt")]
    expected = f"step-17-{first.replace(' ', '-')}.pt"
    assert expected in cases if fault else not cases
    assert recorder.checked["rows"] == 18 * 2


def test_a_graph_copies_rows_of_fp8_queries_with_their_scale() -> None:
    starts, lens = torch.arange(4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    table = torch.zeros(3, 1, dtype=torch.int32)
    step = StepTensors(starts, lens, table, torch.arange(3), 1, 1, 16)
    samples = GraphSamples(2)
    samples.prepare(step)
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
    [graph] = samples._graphs.values()
    graph.rows.copy_(torch.tensor([2, 0]))
    samples.capture(call, "layers")
    copied = graph.call
    assert copied is not None and copied.query_scale is call.query_scale
    assert copied.query.dtype == torch.float8_e4m3fn
    assert torch.equal(copied.query.float(), query[[2, 0]])
    assert torch.equal(copied.output.float(), query[[2, 0]])
