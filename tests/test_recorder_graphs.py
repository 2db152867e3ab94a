"""The recorder in captured steps, without a GPU: the checks of `tests/gpu/recorder.py`."""

import sys
from pathlib import Path

import pytest
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import RecordedOperations, Recorder, RecorderSettings
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
