"""The program that compares tuned tables with the default ones, tried in the interpreter."""

import json
import sys
from pathlib import Path

import pytest
import torch
from pagetwin.optimized.kernels.portable.host.tuning import Tiles
from pagetwin.optimized.kernels.portable.tables.active_tables import find_tables
from pagetwin.optimized.kernels.portable.tables.kernel_tables import DEFAULT, TileKey
from pagetwin.optimized.kernels.portable.tables.tuned_rows import TunedRow
from pagetwin.tools.bench.workloads import load_workloads
from support.twins import WITHOUT_GPU

GPU = Path(__file__).parents[1] / "gpu"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Return the module of the program."""
    monkeypatch.syspath_prepend(str(GPU))
    import tuned_tables

    return tuned_tables


@WITHOUT_GPU
@pytest.mark.extended
def test_workloads_are_timed_with_the_tables_of_files_of_any_chip(
    program,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = TileKey("small batch", 16, 32, 32, 2, "auto", True, ())
    row = TunedRow(key, Tiles(16, 32, 4, 1), Tiles(16, 64, 4, 1))
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"rows": [row.to_record()]}))
    out = tmp_path / "out.json"
    words = ["compare", str(out), "decode-8x32k", "--tables", str(file), "--smoke"]
    monkeypatch.setattr(sys, "argv", ["tuned_tables.py", *words, "--rounds", "1"])
    assert program.main() == 0
    assert "ours-other: 1 workloads, " in capsys.readouterr().out
    (workload,) = json.loads(out.read_text())["workloads"]
    assert set(workload["results"]) == {"ours", "ours-other"}
    assert all(entry["status"] == "timed" for entry in workload["results"].values())
    assert find_tables(torch.device("cpu")) is DEFAULT


def test_the_layers_of_workloads_are_those_that_have_tables(
    program,  # type: ignore[no-untyped-def]
) -> None:
    known = load_workloads("all")
    found = program.find_layers(list(known.values()), 132)
    assert len(found) == len(set(found)) > 5
    assert {layer.cache_format for layer in found} == {"auto", "fp8_e4m3"}
    sizes = {layer.layer.head_size for layer in found}
    assert {64, 128, 256} <= sizes and 576 not in sizes
    assert any(layer.layer.window for layer in found)
