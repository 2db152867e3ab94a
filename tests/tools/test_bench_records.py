"""Records of the benchmark: ratios, aims, plots and the page of the documentation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import CEILINGS, NAMES, AsOurs, settings_of
from pagetwin.tools.bench import Benchmark, load_workloads
from pagetwin.tools.bench.accuracy import Finding
from pagetwin.tools.bench.results import BenchStatus, Entry, workload_record
from pagetwin.tools.bench.tables import aim_table, markdown
from pagetwin.tools.bench.workloads import published_figures

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)


@pytest.fixture
def gpu_record() -> dict[str, Any]:
    """Return a record as a GPU would leave it, with times that were made up."""
    run = Benchmark(settings_of("decode-16x512"), [AsOurs("cpu")])
    record = run.record()
    workloads = load_workloads()
    names = ("decode-64x4k", "prefill-1x8k", "write-8k")
    published = published_figures("NVIDIA H200")
    times = {
        "ours": (260.0, 850.0, 25.0),
        "fa3": (265.0, 859.0, None),
        "torch-flash": (200.0, 900.0, None),
    }
    record["workloads"] = []
    for place, name in enumerate(names):
        entries = {}
        for peer, medians in times.items():
            us = medians[place]
            entries[peer] = Entry(BenchStatus.DECLINED, "no cache")
            if us is not None:
                entries[peer] = Entry(
                    BenchStatus.TIMED,
                    finding=Finding(True),
                    rounds=[[us] * 3] * 2,
                    host_us=20.0,
                    same_work=peer != "torch-flash",
                )
        record["workloads"].append(
            workload_record(workloads[name], entries, [1, 2], CEILINGS, published)
        )
    record |= {"ceilings": CEILINGS.to_record(), "published": published}
    record |= {"meaningless": None, "complete": True, "ended": "complete"}
    record["implementations"] = {
        name: {"title": name, "version": None, "missing": None} for name in times
    }
    record["machine"]["device"] = "NVIDIA H200"
    return record


def test_ratios_are_shown_with_the_best_baseline_and_with_what_was_published(
    gpu_record: dict[str, Any],
) -> None:
    decode, prefill, write = gpu_record["workloads"]
    # what torch was timed on had its keys gathered for it
    assert (decode["fastest"], decode["best_peer"]) == ("torch-flash", "fa3")
    assert decode["ratio_to_best_peer"] == decode["ratio_to_fa3"]
    assert decode["ratio_to_best_peer"] == pytest.approx(260 / 265, abs=1e-4)
    assert decode["published"] == {"by": "flashinfer", "us": 262.0, "ratio": 0.9924}
    ours = decode["results"]["ours"]
    assert ours["gb_per_s"] == pytest.approx(1074.8e6 / 260e3, rel=1e-3)
    assert ours["share_of_ceiling"] == pytest.approx(1074.8 / 4 / 260, rel=1e-3)
    assert prefill["floor_of"] == "operations"
    assert prefill["results"]["ours"]["tflop_per_s"] == pytest.approx(647, rel=1e-3)
    assert write["best_peer"] is None and write["ratio_to_best_peer"] is None
    page = markdown(gpu_record)
    assert "| 0.981 (fa3) | 0.992 (flashinfer) |" in page
    assert "reading 4,000 GB/s" in page


@pytest.mark.parametrize(
    ("name", "times", "baseline", "ratio", "met"),
    [
        (
            "mla-decode-128h-32x8k",
            {"fa3": 200.0, "flashmla": 125.0},
            "flashmla",
            0.8,
            True,
        ),
        ("prefill-2x4k-d96", {"fa3": 80.0, "torch-flash": 50.0}, "fa3", 1.25, False),
        ("prefill-2x4k-alibi", {"flashinfer": 200.0}, "flashinfer", 0.5, True),
        ("decode-2x2k", {"fa3": 100.0, "vllm": 101.0}, "fa3", 1.0, True),
        ("invariant-decode-64x4k", {"ours-plain": 80.0}, "ours-plain", 1.25, False),
        ("prefill-1x6k-cap30-d256", {}, None, None, None),
    ],
)
def test_a_ratio_is_compared_with_the_aim(
    name: str, times: dict[str, float], baseline: str, ratio: float, met: bool
) -> None:
    """Against the fastest of the named baselines, or against the best if none was timed."""
    entries = {
        library: Entry(
            BenchStatus.TIMED, rounds=[[us] * 3], same_work=library != "torch-flash"
        )
        for library, us in ({"ours": 100.0} | times).items()
    }
    workload = load_workloads("extended")[name]
    found = workload_record(workload, entries, [1], CEILINGS, None)["aim"]
    assert (found["baseline"], found["ratio"], found["met"]) == (baseline, ratio, met)
    assert found["at_most"] == workload.aim


@pytest.mark.extended
def test_a_record_of_a_gpu_is_drawn_with_its_roofline(
    gpu_record: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from pagetwin.tools.bench.plot import LIGHT, draw_benchmark, write_plots

    figure = draw_benchmark(gpu_record, LIGHT)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["roofline", ""]
    paths = write_plots(gpu_record, tmp_path / "bench.png")
    assert [path.name for path in paths] == ["bench.png", "bench-dark.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_the_page_shows_the_newest_run_or_says_that_there_is_none(
    gpu_record: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "hooks"))
    import bench_table
    from page_data import keep

    assert bench_table.bench_table(tmp_path) == "*No run is recorded yet.*"
    machine = gpu_record["machine"]
    dates = {
        "NVIDIA H200": ("2026-11-20T10:00:00+00:00", "2026-11-21T10:00:00+00:00"),
        "NVIDIA H100": ("2026-11-19T10:00:00+00:00",),
    }
    for device, its_dates in dates.items():
        for date in its_dates:
            run = gpu_record | {"machine": machine | {"device": device, "date": date}}
            path = tmp_path / "record.json"
            path.write_text(json.dumps(run))
            keep("bench", [path], tmp_path)
    page = bench_table.bench_table(tmp_path)
    assert "NVIDIA H200, 2026-11-21" in page and "2026-11-20" not in page
    assert page.index("NVIDIA H200") < page.index("NVIDIA H100")
    assert page.count("| decode-64x4k | 260 | 265 | 200 |") == 2
    assert "- fa3 declined in write-8k: no cache" in page
    assert all(name in bench_table.bench_workloads() for name in NAMES)
    assert "(176)" in bench_table.bench_published()
    assert "`mla-decode-16h-256x1k`" in bench_table.bench_extended_workloads()


def test_the_page_shows_the_aims_of_the_extended_record(
    gpu_record: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "hooks"))
    import bench_table
    from page_data import keep

    assert "No run of the extended suite" in bench_table.bench_extended(tmp_path)
    assert aim_table(gpu_record) is None
    entries = {
        "ours": Entry(BenchStatus.TIMED, rounds=[[90.0]], kernels=["sm90 prefill"]),
        "fa3": Entry(
            BenchStatus.TIMED,
            rounds=[[100.0]],
            finding=Finding(False, share=9.0, error=0.04),
            within_budget=False,
        ),
    }
    workload = load_workloads("extended")["prefill-1x16k-fp8-vs-fa3"]
    made = workload_record(workload, entries, [1], CEILINGS, None)
    file = tmp_path / "record.json"
    file.write_text(json.dumps(gpu_record | {"workloads": [made]}))
    keep("bench_extended", [file], tmp_path)
    page = bench_table.bench_extended(tmp_path)
    row = "90.0 | fa3 | (100) | 0.900 | 1.00 | yes | sm90 prefill |"
    assert f"| prefill-1x16k-fp8-vs-fa3 | {row}" in page
    assert "1 of 1 aims are met." in page and "relative error 0.04" in page
    assert bench_table.bench_table(tmp_path) == "*No run is recorded yet.*"
