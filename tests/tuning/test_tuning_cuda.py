"""Tuning on a GPU: times of captured graphs, kernels that do not fit, and the tables in use."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagetwin.contract.tuning_classes import TuningInUse, TuningReport
from pagetwin.optimized import (
    cascade_attention,
    load_tuning,
    paged_attention,
    tune_kernels,
)
from pagetwin.optimized.kernels.portable.host.family import FAMILIES
from pagetwin.optimized.kernels.portable.host.plans import PortableDecodePlan
from pagetwin.optimized.kernels.portable.tables.active_tables import find_tables
from pagetwin.optimized.kernels.portable.tables.kernel_tables import DEFAULT
from pagetwin.optimized.tuning import candidates
from pagetwin.tools.tune.clock import BenchClock
from pagetwin.tools.tune.jobs import TunedLayer, choose_jobs
from pagetwin.tools.tune.layers import LayerSizes
from support.forced_choices import these_families

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Let the device have the default tables again afterwards."""
    yield
    load_tuning(None, GPU)


@pytest.fixture(scope="module")
def layer() -> TunedLayer:
    processors = torch.cuda.get_device_properties(GPU).multi_processor_count
    return TunedLayer(LayerSizes(8, 2, 64), "bfloat16", "auto", 1 << 28, processors)


@pytest.fixture(scope="module")
def report(layer: TunedLayer) -> TuningReport:
    """The report of a run of a minute."""
    return tune_kernels(choose_jobs([layer]), BenchClock("cuda"), 60.0, GPU)


def test_every_choice_is_measured_and_no_result_is_wrong(report: TuningReport) -> None:
    assert report.wrong == () and report.tried > 20
    assert len(report.record["rows"]) >= 3
    for row in report.record["rows"]:
        times = (*row["default_us"].values(), *row["choice_us"].values())
        assert times and all(0 < us < 1e6 for us in times)
        assert row["ratio"] <= 0.98 or row["choice"] == row["default"], row


def test_attention_with_the_measured_tables_is_right(
    report: TuningReport, layer: TunedLayer, tmp_path: Path, unloaded: None
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(report.record))
    with these_families(*FAMILIES):
        assert isinstance(load_tuning(path, GPU), TuningInUse)
        for job in choose_jobs([layer]):
            for case in (*job.cases, *job.proofs):
                inputs, check = case.make()
                attend = paged_attention
                if "common_prefix_len" in inputs:
                    attend = cascade_attention
                out = attend(**inputs)
                assert check(out) == "", (job.what, case.name)


def test_no_plan_of_a_compiled_kernel_outlives_its_tables(
    report: TuningReport,
    layer: TunedLayer,
    tmp_path: Path,
    unloaded: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls are repeated without a plan, until other tables are loaded."""
    path = tmp_path / "tuned.json"
    rows = [row for row in report.record["rows"] if isinstance(row["key"], dict)]
    rows[0]["choice"] = rows[0]["choice"] | {"num_stages": 1, "block_n": 16}
    path.write_text(json.dumps(report.record | {"rows": rows[:1]}))
    made: list[object] = []
    make = PortableDecodePlan.__init__

    def note(self: PortableDecodePlan, *arguments: object) -> None:
        make(self, *arguments)  # type: ignore[arg-type]
        made.append(self.launches.tables)

    monkeypatch.setattr(PortableDecodePlan, "__init__", note)
    inputs, check = layer.cases([((2 * layer.multiprocessors, 1, 512),)])[0].make()
    with these_families(*FAMILIES):
        for source in (None, path, None):
            load_tuning(source, GPU)
            for _ in range(4):
                inputs["out"].fill_(torch.nan)
                paged_attention(**inputs)
                assert check(inputs["out"]) == ""
    assert len(made) == 3 and made[0] == made[2] == DEFAULT != made[1]
    assert find_tables(GPU) == DEFAULT


def test_tiles_that_do_not_fit_the_chip_are_left_out(
    layer: TunedLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of candidates are estimates: the compiler and the driver decide."""
    monkeypatch.setattr(candidates, "estimate_shared_memory", lambda key, tiles: 0)
    monkeypatch.setattr(candidates, "BLOCK_N", (256,))
    monkeypatch.setattr(candidates, "STAGES", {True: (7,)})
    monkeypatch.setattr(candidates, "WARPS", (4, 8))
    wide = replace(layer, layer=LayerSizes(8, 2, 256))
    job = next(job for job in choose_jobs([wide]) if job.what == "decode")
    found = tune_kernels([job], BenchClock("cuda"), 60.0, GPU, is_exhaustive=True)
    assert found.skipped > 0 and found.ended == "complete" and found.wrong == ()
    (row,) = found.record["rows"]
    assert row["choice"] == row["default"]
