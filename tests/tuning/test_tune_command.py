"""The command `pagetwin tune`: which layers and batches it times, its file, and its errors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from pagetwin import reference
from pagetwin.contract.cache_formats import FORMATS as FORMATS_BY_NAME
from pagetwin.optimized.kernels.portable.host.tuning import Tiles
from pagetwin.optimized.kernels.portable.tables import active_tables
from pagetwin.optimized.tuning import candidates
from pagetwin.tools.cli import app
from pagetwin.tools.tune import clock, jobs
from pagetwin.tools.tune.jobs import TunedLayer, choose_jobs
from pagetwin.tools.tune.layers import FORMATS, STANDARD, LayerSizes, layers_of_model
from support.scripted_clock import ScriptedClock
from support.twins import WITHOUT_GPU
from typer.testing import CliRunner, Result

SMOKE = ("--smoke", "--dtype", "float16", "--heads", "4/2", "--head-size", "32")
Run = Callable[..., Result]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("PAGETWIN_TUNING")
    monkeypatch.setattr(active_tables, "_ACTIVE", {})

    def run(*words: object) -> Result:
        return CliRunner().invoke(app, ["tune", *map(str, words)])

    return run


@pytest.fixture
def two_jobs(monkeypatch: pytest.MonkeyPatch) -> ScriptedClock:
    """Let a run time few decodes and a threshold, with a clock that prefers narrow tiles."""

    def time(value: Any) -> float:
        return float(value.block_n if isinstance(value, Tiles) else value)

    scripted = ScriptedClock(time)
    choose = jobs.choose_jobs

    def choose_two(kinds: Any) -> list[Any]:
        found = {job.what: job for job in choose(kinds)}
        two = [found["small batch"], found["short_tiles"]]
        return [replace(job, cases=job.cases[:1]) for job in two]

    monkeypatch.setattr(jobs, "choose_jobs", choose_two)
    monkeypatch.setattr(clock, "BenchClock", lambda device: scripted)
    monkeypatch.setattr(candidates, "BLOCK_N", (16, 32))
    monkeypatch.setattr(candidates, "WARPS", (4,))
    monkeypatch.setattr(candidates, "STAGES", {True: (1,)})
    return scripted


@WITHOUT_GPU
def test_a_run_writes_a_file_that_is_shown_and_named(
    tune: Run, two_jobs: ScriptedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tune(*SMOKE, "--out", "tuned.json")
    assert done.exit_code == 0, done.output
    assert "small batch, 16 rows, heads of 32" in done.output
    assert "16 x 32, 4 warps, 1 stages" in done.output and "0.500" in done.output
    assert "2 of 2 choices are not the default" in done.output
    record = json.loads(Path("tuned.json").read_text())
    assert record["layout"] == 1 and record["ended"] == "complete"
    assert {"date", "commit", "driver", "torch", "chip", "versions"} <= record.keys()
    assert record["rows"][0]["ratio"] == 0.5
    monkeypatch.setattr(active_tables, "_ACTIVE", {})
    monkeypatch.setenv("PAGETWIN_TUNING", str(tmp_path / "tuned.json"))
    shown = tune("--show")
    assert shown.exit_code == 0, shown.output
    assert str(tmp_path / "tuned.json") in shown.output
    assert "short tiles" in shown.output and "0.500" in shown.output


@WITHOUT_GPU
@pytest.mark.extended
def test_rows_of_other_layers_stay_in_a_file(
    tune: Run, two_jobs: ScriptedClock
) -> None:
    assert tune(*SMOKE, "--out", "tuned.json").exit_code == 0
    other = [word if word != "32" else "64" for word in SMOKE]
    # tiny batches have the same heads: the rows have the same keys
    assert tune(*other, "--out", "tuned.json").exit_code == 0
    record = json.loads(Path("tuned.json").read_text())
    assert len(record["rows"]) == 2
    record["rows"][0]["key"]["head_size"] = 128
    Path("tuned.json").write_text(json.dumps(record))
    done = tune(*SMOKE, "--out", "tuned.json")
    assert "with 1 rows of other layers" in done.output
    heads = [
        row["key"]["head_size"]
        for row in json.loads(Path("tuned.json").read_text())["rows"]
        if isinstance(row["key"], dict)
    ]
    assert heads == [32, 128]
    record["kernels"] = "0"
    Path("tuned.json").write_text(json.dumps(record))
    done = tune(*SMOKE, "--out", "tuned.json")
    assert len(json.loads(Path("tuned.json").read_text())["rows"]) == 2


@WITHOUT_GPU
def test_an_interrupt_leaves_the_file_or_finished_rows(
    tune: Run, two_jobs: ScriptedClock
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    two_jobs.on_race = interrupt
    Path("tuned.json").write_text("before")
    done = tune(*SMOKE, "--out", "tuned.json")
    assert done.exit_code == 130 and "nothing is written" in done.output
    assert Path("tuned.json").read_text() == "before"
    # the second race between values of the threshold
    two_jobs.on_race = lambda: (
        any(2 in raced for raced in two_jobs.raced) and interrupt()
    )
    two_jobs.raced.clear()
    done = tune(*SMOKE, "--out", "tuned.json")
    assert done.exit_code == 130 and "interrupted" in done.output
    rows = json.loads(Path("tuned.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["small batch, 16 rows, heads of 32"]
    assert [path.name for path in Path().iterdir()] == ["tuned.json"]


WRONG: dict[str, tuple[tuple[object, ...], str]] = {
    "no GPU": ((), "torch has no CUDA device here"),
    "smoke without a file": (("--smoke",), "--smoke needs --out"),
    "heads": (("--heads", "32x8", "--head-size", 128), "heads = '32x8': expected"),
    "heads that do not divide": (
        ("--heads", "32/5", "--head-size", 128),
        "of which the second divides the first",
    ),
    "a head size alone": (("--head-size", 64), "expected both, or --model, or none"),
    "a window alone": (("--window", 64), "expected it with --heads and --head-size"),
    "a dtype": (("--dtype", "int8"), "dtype = 'int8': expected one of bfloat16"),
    "a format": (("--cache-format", "nvfp4"), "cache_format = 'nvfp4': expected one"),
    "a search": (("--search", "random"), "search = 'random': expected one of"),
    "no minutes": (("--minutes", 0), "minutes = 0: expected more than 0"),
    "a folder as file": (("--out", "."), "is a folder: expected a file"),
    "a file of another kind": (("--out", "a.html"), "expected a file that ends in .json"),
    "a model that is missing": (("--model", "none.json"), "none.json: expected a model's"),
    "show and more": (("--show", "--minutes", 2), "expected it without --minutes"),
    "little memory": (
        ("--dry-run", "--heads", "32/8", "--head-size", 128, "--memory-gb", 0.001),
        "memory_gb: a batch of 32/8 heads of 128 takes",
    ),
    "model and heads": (
        ("--model", "a.json", "--heads", "4/2"),
        "expected it without these options",
    ),
}  # fmt: skip


@WITHOUT_GPU
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_one_sentence(name: str, tune: Run) -> None:
    words, expected = WRONG[name]
    done = tune(*words)
    assert done.exit_code == 2, done.output
    assert expected in done.output and done.output.count("\n") == 1
    assert not [*Path().iterdir()]


def test_a_file_that_does_not_fit_is_one_sentence_of_show(
    tune: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("old.json").write_text('{"layout": 0}')
    monkeypatch.setenv("PAGETWIN_TUNING", "old.json")
    done = tune("--show")
    assert done.exit_code == 2 and "has layout 0: expected 1" in done.output
    assert done.output.count("\n") == 1


LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
QWEN = LLAMA | {"sliding_window": 4096, "use_sliding_window": False}
MISTRAL = LLAMA | {"sliding_window": 4096}
GEMMA = {"text_config": GPT_OSS | {"layer_types": None, "sliding_window_pattern": 6}}
MODELS: dict[str, tuple[Mapping[str, Any], list[LayerSizes]]] = {
    "Llama": (LLAMA, [LayerSizes(32, 8, 128)]),
    "gpt-oss": (GPT_OSS, [LayerSizes(64, 8, 64), LayerSizes(64, 8, 64, 128)]),
    "Qwen": (QWEN, [LayerSizes(32, 8, 128)]),
    "Mistral": (MISTRAL, [LayerSizes(32, 8, 128, 4096)]),
    "Gemma": (GEMMA, [LayerSizes(64, 8, 64), LayerSizes(64, 8, 64, 128)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_a_model_are_in_its_config(name: str, tmp_path: Path) -> None:
    config, layers = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, dtype = layers_of_model(tmp_path)
    assert list(found) == layers
    assert dtype == config.get("torch_dtype")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ([1], "expected a model's config.json"),
        (LLAMA | {"kv_lora_rank": 512}, "has latent attention"),
        ({}, "has num_attention_heads = None: expected an integer from 1"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads = 0: expected"),
        (LLAMA | {"num_key_value_heads": 5}, "do not fit each other"),
        (LLAMA | {"head_dim": 2048}, "head_dim = 2048: expected an integer from 1"),
        (LLAMA | {"hidden_size": 16}, "a head size of 0 do not fit each other"),
        (LLAMA | {"sliding_window": "all"}, "sliding_window = 'all': expected"),
    ],
)
def test_a_config_without_such_layers_is_an_error(
    config: Any, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        layers_of_model(path)
    assert expected in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("cache_format", ["auto", "fp8_e4m3", "int8_per_token_head"])
def test_batches_fill_the_chip_and_fit_the_memory(cache_format: str) -> None:
    kinds = [
        TunedLayer(layer, "bfloat16", cache_format, 1 << 30, 132) for layer in STANDARD
    ]
    found = choose_jobs(kinds)
    assert len(found) == 9 + 3 + 5
    for kind in kinds:
        for lens in (((300, 1, 8192),), ((1, 1, 131072),)):
            batch = kind.batch(lens)
            rows = sum(batch.kv_lens) * kind.layer.kv_heads * 2 * kind.layer.head_size
            assert rows <= 1 << 30
    decode = next(job for job in found if job.what == "decode")
    # more requests than programs, so that they are not a small batch
    assert all(int(case.name.split()[0]) > 132 // 8 for case in decode.cases)
    assert {job.rows for job in found if job.what == "append"} == {32, 64, 128}


@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_batch_has_the_cache_of_its_format(cache_format: str) -> None:
    layer = LayerSizes(4, 2, 64)
    kind = TunedLayer(layer, "float16", cache_format, 1 << 24, 4, is_tiny=True)
    inputs, check = kind.cases([((2, 1, 40),)])[0].make()
    form = FORMATS_BY_NAME[cache_format]
    assert inputs["key_cache"].dtype == (form.dtype or torch.float16)
    assert (inputs["options"].k_scale is None) == (cache_format == "auto")
    out = reference.paged_attention(**inputs)
    assert check(out) == "" and check(out + 1) != ""


def test_the_batches_of_a_layer_are_what_the_names_say() -> None:
    kind = TunedLayer(LayerSizes(8, 2, 64, 100), "float16", "fp8_e5m2", 1 << 20, 4)
    batch = kind.batch(((2, 1, 512), (1, 5, 300)))
    assert batch.name == "2 x 512 + 1 x 5 of 300, 8/2 heads of 64, window 100"
    assert batch.query_lens == (1, 1, 5) and batch.kv_lens == (512, 512, 300)
    assert batch.kv_dtype == torch.float8_e5m2 and batch.sliding_window == 100
    (proof,) = kind.proofs((1, 4))
    inputs, check = proof.make()
    assert inputs["query"].shape == (5 * 8, 8, 64)
    assert "not written" in check(inputs["out"])


@WITHOUT_GPU
def test_a_dry_run_lists_what_would_be_timed(tune: Run) -> None:
    done = tune("--dry-run", "--memory-gb", 1)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert len(lines) == 17 and lines[0].startswith("decode: 64 x 4096, 32/8 heads")
    assert not [*Path().iterdir()]


@WITHOUT_GPU
def test_the_clock_runs_and_times_each_call() -> None:
    ran: list[str] = []
    real = clock.BenchClock("cpu")
    calls = {name: real.prepare(lambda name=name: ran.append(name)) for name in "ab"}
    times = real.race(calls, 3)
    # each has run once before, to find out how many turns there is time for
    assert sorted(ran) == ["a"] * 4 + ["b"] * 4
    assert {name: len(runs) for name, runs in times.items()} == {"a": 3, "b": 3}
    assert real.now() > 0


@WITHOUT_GPU
def test_slow_calls_have_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "RACE_SECONDS", 1e-6)
    ran: list[None] = []
    times = clock.BenchClock("cpu").race({0: lambda: ran.append(sleep(1e-3))}, 9)
    assert len(times[0]) == 1 and len(ran) == 2
