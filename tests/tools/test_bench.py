"""Runs of the benchmark: smoke runs of both suites, interrupted runs, and rejected arguments."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import NAMES, AsOurs, Plain, Scales, run, settings_of, small
from pagetwin.contract.operations import load_implementation
from pagetwin.tools.bench import Benchmark, choose_settings, load_workloads
from pagetwin.tools.bench.inputs import draw_inputs
from pagetwin.tools.bench.libraries.launches import watch_launches
from pagetwin.tools.bench.libraries.library import Prepared
from pagetwin.tools.bench.libraries.ours import Ours
from pagetwin.tools.bench.tables import reasons
from pagetwin.tools.cli import USER_ERROR

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a smoke run of everything from the command line: what it printed and wrote."""
    folder = tmp_path_factory.mktemp("bench")
    files = {name: folder / f"bench.{name}" for name in ("json", "md", "svg")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "150")
        patch.setenv("TRITON_INTERPRET", "1")
        result = run(
            "--smoke",
            *("--device", "cpu", "--implementations", "torch,fa3", "--repeats", 1),
            *("--json", files["json"], "--markdown", files["md"]),
            *("--plot", files["svg"], "--commit", "0123456789abcdef"),
        )
    record = json.loads(files["json"].read_text())
    return SimpleNamespace(result=result, record=record, folder=folder, files=files)


@pytest.mark.long
def test_a_smoke_run_does_every_workload_right(smoke: Any) -> None:
    assert smoke.result.exit_code == 0, smoke.result.output
    record = smoke.record
    assert record["complete"] and record["smoke"]
    assert [workload["name"] for workload in record["workloads"]] == NAMES
    for workload in record["workloads"]:
        ours = workload["results"]["ours"]
        assert ours["status"] == "timed", workload["name"]
        assert ours["share_of_budget"] <= 1
        assert ours["median_us"] > 0


@pytest.fixture(scope="module")
def extended_smoke(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a smoke run of the extended suite: what it printed, and its record."""
    file = tmp_path_factory.mktemp("extended") / "record.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        result = run(
            *("--smoke", "--device", "cpu", "--suite", "extended", "--json", file),
            *("--implementations", "fa3,flashmla,torch-index", "--repeats", 1),
        )
    return SimpleNamespace(result=result, record=json.loads(file.read_text()))


@pytest.mark.long
def test_a_smoke_run_does_every_extended_workload_right(extended_smoke: Any) -> None:
    assert extended_smoke.result.exit_code == 0, extended_smoke.result.output
    record = extended_smoke.record
    workloads = load_workloads("extended")
    assert [workload["name"] for workload in record["workloads"]] == list(workloads)
    for workload in record["workloads"]:
        ours = workload["results"]["ours"]
        assert ours["status"] == "timed" and ours["share_of_budget"] <= 1, workload[
            "name"
        ]
        for name in workloads[workload["name"]].baselines:
            status = workload["results"].get(name, {}).get("status")
            assert status == ("timed" if name.startswith("ours") else status)
        if workload["kind"] == "write":
            assert workload["results"]["torch-index"]["status"] == "timed"
            assert "kernels" not in ours
        else:
            assert all(kernel.startswith("portable ") for kernel in ours["kernels"])


@pytest.mark.long
def test_a_smoke_run_prints_kernels_and_aims(extended_smoke: Any) -> None:
    output = extended_smoke.result.output
    assert "0 of 34 aims are met; 34 have no ratio" in output
    assert "ours-bf16 declined in all but prefill-1x16k-fp8" in output
    (line,) = (line for line in output.splitlines() if line.startswith("mixed-100+6:"))
    assert line.endswith("(portable decode + portable prefill)")


@pytest.mark.long
def test_a_smoke_run_says_that_its_times_mean_nothing(smoke: Any) -> None:
    assert smoke.record["meaningless"] == "interpreter"
    assert "whose times have no meaning" in smoke.result.output
    for line in smoke.result.output.splitlines():
        if line.startswith("decode-64x4k:"):
            assert "ours interpreter" in line and " us" not in line
            assert "torch-flash tiny" in line  # torch is never interpreted
    page = smoke.files["md"].read_text()
    assert "the times have no meaning" in page
    assert not any(workload["best_peer"] for workload in smoke.record["workloads"])


@pytest.mark.extended
def test_who_is_missing_or_declines_is_listed_with_the_reason(smoke: Any) -> None:
    for text in (smoke.result.output, smoke.files["md"].read_text()):
        assert "fa3 missing: needs a CUDA device" in text
        assert "torch-flash declined in write-8k" in text
    entries = {
        workload["name"]: workload["results"]["torch-flash"]
        for workload in smoke.record["workloads"]
    }
    assert entries["decode-256-ragged"]["status"] == "declined"
    assert "differ in length" in entries["decode-256-ragged"]["reason"]
    assert entries["decode-64x4k"]["note"] == "dense: keys gathered in advance"
    assert not entries["decode-64x4k"]["same_work"]
    assert entries["encoder-32x1500"]["same_work"]


@pytest.mark.extended
def test_a_record_says_with_what_it_was_made(smoke: Any) -> None:
    record = smoke.record
    assert set(record) == {
        "format",
        "ended",
        "complete",
        "smoke",
        "meaningless",
        "seconds",
        "machine",
        "settings",
        "method",
        "ceilings",
        "published",
        "implementations",
        "workloads",
    }
    assert {"date", "device", "commit", "versions", "cuda"} <= set(record["machine"])
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert record["machine"]["commit"] == "0123456789abcdef"
    assert "Commit 0123456789ab;" in smoke.files["md"].read_text()
    assert record["settings"]["repeats"] == 1
    assert all(len(workload["seeds"]) == 1 for workload in record["workloads"])
    assert record["implementations"]["fa3"]["missing"] == "needs a CUDA device"
    assert {
        "status",
        "error",
        "share_of_budget",
        "median_us",
        "quartiles_us",
        "rounds_us",
        "runs",
        "graph",
        "host_us",
        "gb_per_s",
        "tflop_per_s",
        "share_of_ceiling",
    } <= set(record["workloads"][0]["results"]["ours"])


@pytest.mark.extended
def test_a_plot_is_drawn_for_light_and_for_dark_pages(smoke: Any) -> None:
    light, dark = (
        (smoke.folder / f"bench{name}.svg").read_text() for name in ("", "-dark")
    )
    assert "<svg" in light and "<svg" in dark and light != dark


def test_the_command_fails_when_ours_is_wrong(monkeypatch: Any) -> None:
    monkeypatch.setattr(Ours, "prepare", Scales("cpu").prepare)
    result = run(
        "--smoke", "--device", "cpu", "decode-16x512", "--implementations", "ours"
    )
    assert result.exit_code == 1
    assert "Ours is wrong or fails in decode-16x512" in result.output


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    class Impatient(Plain):
        def prepare(self, inputs: Any) -> Prepared:
            if inputs.workload.name == "decode-64x4k-swa":
                raise KeyboardInterrupt
            return super().prepare(inputs)

    file = tmp_path / "record.json"
    names = ("decode-16x512", "decode-64x4k-swa", "write-8k")
    everyone = [AsOurs("cpu"), Impatient("cpu")]
    Benchmark(settings_of(*names), everyone, json_file=file).run()
    record = json.loads(file.read_text())
    assert record["ended"] == "interrupted" and not record["complete"]
    statuses = [
        workload["results"]["plain"]["status"] for workload in record["workloads"]
    ]
    assert statuses == ["timed", "not run", "not run"]
    assert "plain not run in decode-64x4k-swa, write-8k: interrupted" in reasons(record)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_peer_that_takes_the_process_with_it_leaves_the_record(
    tmp_path: Path,
) -> None:
    """What a segmentation fault would leave is what is in the file when it is called."""
    file, found = tmp_path / "record.json", []

    class Deadly(Plain):
        def prepare(self, inputs: Any) -> Prepared:
            found.append(json.loads(file.read_text()))
            return super().prepare(inputs)

    names = ("decode-16x512", "decode-64x4k-swa")
    Benchmark(settings_of(*names), [AsOurs("cpu"), Deadly("cpu")], json_file=file).run()
    last = found[-1]
    assert last["ended"] == "stopped during plain in decode-64x4k-swa"
    assert last["workloads"][0]["results"]["plain"]["status"] == "timed"


def test_a_limit_ends_a_run_in_order() -> None:
    run = Benchmark(settings_of(*NAMES[:3], limit=1e-9), [AsOurs("cpu")])
    record = run.run()
    assert record["ended"] == "the limit of 1e-09 s, in round 1"
    assert {
        workload["results"]["ours"]["status"] for workload in record["workloads"]
    } == {"not run"}


def test_every_round_has_inputs_of_its_own_that_other_workloads_do_not_change() -> None:
    alone = Benchmark(settings_of("decode-16x512", rounds=2), [AsOurs("cpu")]).run()
    beside = Benchmark(
        settings_of("decode-64x4k-swa", "decode-16x512", rounds=2), [AsOurs("cpu")]
    ).run()
    seeds = alone["workloads"][0]["seeds"]
    assert len(set(seeds)) == 2
    assert beside["workloads"][0]["seeds"] == seeds
    ours = alone["workloads"][0]["results"]["ours"]
    assert ours["runs"] == 4 and len(ours["rounds_us"]) == 2


@pytest.mark.extended
def test_kernels_are_named_by_the_plans_that_were_launched() -> None:
    """The plan cache of other calls keeps its plans."""
    from pagetwin.optimized.dispatch import dispatch

    twin = load_implementation("optimized")
    cached = dispatch.PIPELINE.plans
    for name, kernels in (
        ("decode-16x512", ["portable decode"]),
        ("prefill-8x2k", ["portable prefill"]),
        ("cascade-128x4k+256", ["portable prefix", "portable rest"]),
        ("write-8k", []),
    ):
        library = Ours("cpu")
        prepared = library.prepare(draw_inputs(small(name), 0, "cpu"))
        with library.watch() as found:
            prepared.call()
        assert found == kernels, name
    with pytest.raises(RuntimeError), watch_launches(twin):
        raise RuntimeError
    assert dispatch.PIPELINE.plans is cached


def test_a_decode_of_the_hopper_fp8_kernel_is_not_named_portable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is launched by the portable plan, whose name the report gave it."""
    from pagetwin.optimized.kernels.sm90.code_decode import family
    from pagetwin.optimized.runtime import launcher

    monkeypatch.setattr(launcher.Launcher, "__call__", lambda *_: None)
    # the smallest batches have a portable kernel
    monkeypatch.setattr(family.CodeDecodePlan, "takes", lambda *_: True)
    found = []
    for is_supported in (True, False):
        monkeypatch.setattr(family, "is_hopper", lambda _, it=is_supported: it)
        monkeypatch.setattr(family, "takes_signature", lambda *_: True)
        library = Ours("cpu")
        prepared = library.prepare(draw_inputs(small("decode-64x4k-fp8"), 0, "cpu"))
        with library.watch() as names:
            prepared.call()
        found += names
    assert found == ["sm90 code decode", "portable decode"]


def test_an_unknown_workload_is_answered_with_those_that_are_near() -> None:
    result = run("--smoke", "--device", "cpu", "decode-64x4")
    assert result.exit_code == USER_ERROR
    words = " ".join(result.output.split())
    assert "'decode-64x4': did you mean decode-64x4k" in words
    with pytest.raises(ValueError, match="expected some of decode-64x4k, decode-256"):
        choose_settings(["quantum"], device="cpu", smoke=True)


def test_a_pattern_names_several_workloads_in_their_order() -> None:
    chosen = settings_of("write-8k", "decode-64x4k*")
    assert [workload.name for workload in chosen.workloads] == [
        "decode-64x4k",
        "decode-64x4k-mha",
        "decode-64x4k-fp8",
        "decode-64x4k-swa",
        "write-8k",
    ]


@pytest.mark.long
def test_without_a_gpu_full_workloads_are_rejected_and_smoke_is_named() -> None:
    result = run()
    assert result.exit_code == USER_ERROR
    assert "--smoke" in result.output and "CUDA device" in result.output
    assert run("--device", "cuda").exit_code == USER_ERROR


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--implementations", "ours,flashy"), "implementations = 'flashy'"),
        (("--rounds", "-1"), "rounds = -1"),
        (("--limit", "0"), "limit = 0"),
        (("--device", "tpu"), "device = 'tpu'"),
        (("--json", "nowhere/record.json"), "json = nowhere/record.json"),
        (("--plot", "plot.pdf"), "plot = plot.pdf"),
        (("--fa3", "nowhere.so"), "fa3 = nowhere.so"),
        (("--flashmla", "nowhere.so"), "flashmla = nowhere.so"),
        (
            ("--suite", "both"),
            "suite = 'both': expected standard, extended, formats, sparse, all",
        ),
    ],
)
def test_what_cannot_be_is_rejected_before_anything_is_measured(
    words: tuple[str, ...], said: str
) -> None:
    device = () if "--device" in words else ("--device", "cpu")
    result = run("--smoke", *device, *words)
    assert result.exit_code == USER_ERROR
    assert said in result.output
