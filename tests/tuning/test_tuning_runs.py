"""Tuning runs in the interpreter, with a clock that a test sets."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.tuning_classes import TuningCase, TuningJob, TuningReport
from pagetwin.optimized import load_tuning, tune_kernels
from pagetwin.optimized.kernels.portable.host.cost import RATES, Rates
from pagetwin.optimized.kernels.portable.host.decode_sizes import estimate_shared_memory
from pagetwin.optimized.kernels.portable.host.tuning import Tiles
from pagetwin.optimized.kernels.portable.tables.active_tables import find_tables
from pagetwin.optimized.kernels.portable.tables.kernel_tables import DEFAULT, TileKey
from pagetwin.optimized.runtime.cost_layer import BatchBounds, Layer
from pagetwin.optimized.runtime.launcher import Launcher
from pagetwin.optimized.tuning import candidates
from pagetwin.optimized.tuning.candidates import NumberSpace, TileSpace
from pagetwin.optimized.tuning.rates import PREFILL, TimedBatch, fit_rates
from pagetwin.optimized.tuning.search import REPEATS
from pagetwin.tools.tune.jobs import TunedLayer, choose_jobs
from pagetwin.tools.tune.layers import LayerSizes
from support.compiler_process import json_lines
from support.scripted_clock import ScriptedClock
from support.twins import WITHOUT_GPU

pytestmark = WITHOUT_GPU
few = pytest.mark.usefixtures("few_candidates")
CPU = torch.device("cpu")
LAYER = TunedLayer(LayerSizes(4, 2, 32), "float16", "auto", 1 << 30, 4, is_tiny=True)
JOBS = choose_jobs([LAYER])
DEFAULT_TILES = Tiles(16, 32, 4, 1)


def jobs_of(*what: str) -> list[TuningJob]:
    """Return the first job of each kind, with one of its batches."""
    found = [next(job for job in JOBS if job.what == name) for name in what]
    return [replace(job, cases=job.cases[:1]) for job in found]


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs try few values: the interpreter launches and checks each of them."""
    monkeypatch.setattr(candidates, "BLOCK_N", (16, 32))
    monkeypatch.setattr(candidates, "WARPS", (4, 8))
    monkeypatch.setattr(candidates, "STAGES", {True: (1,)})
    monkeypatch.setattr(candidates, "PROGRAMS", {"decode": (2,)})
    monkeypatch.setattr(candidates, "FLOP_PER_US", (32,))


def narrow_is_fast(value: Any) -> float:
    """Return a time that falls with the keys of a tile, and with warps up to 8."""
    return value.block_n * (10 - value.num_warps) if isinstance(value, Tiles) else 1.0


def run(
    jobs: Sequence[TuningJob],
    time: Callable[[Any], float] = narrow_is_fast,
    seconds: float = 1e6,
    **named: Any,
) -> tuple[TuningReport, ScriptedClock]:
    exhaustive = named.pop("is_exhaustive", False)
    clock = ScriptedClock(time, **named)
    return tune_kernels(jobs, clock, seconds, CPU, exhaustive), clock


def choices_of(report: TuningReport) -> list[Any]:
    return [row["choice"] for row in report.record["rows"]]


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Let the device have the default tables again afterwards."""
    yield
    load_tuning(None, CPU)


@few
@pytest.mark.extended
def test_a_run_finds_the_fastest_tiles_and_its_file_is_loaded(
    tmp_path: Path, unloaded: None
) -> None:
    words: list[tuple[int, str]] = []
    clock = ScriptedClock(narrow_is_fast)
    jobs = jobs_of("decode", "prefill", "append", "short_tiles")
    report = tune_kernels(
        jobs, clock, 1e6, CPU, on_progress=lambda *of: words.append(of)
    )
    assert report.ended == "complete" and report.wrong == () and report.tried > 5
    rows = {row["name"]: row for row in report.record["rows"]}
    decode = rows["decode, 16 rows, heads of 32"]
    fastest = {"block_m": 16, "block_n": 16, "num_warps": 8, "num_stages": 1}
    assert decode["choice"] == fastest | {"programs": 0}
    assert decode["ratio"] == round((16 * 2) / (32 * 6), 4)
    assert set(decode["default_us"]) == {case.name for case in jobs[0].cases}
    # all values of the threshold take the same time
    assert rows["short tiles"]["choice"] == rows["short tiles"]["default"]
    assert words[0] == (0, "decode") and words[-1] == (len(jobs) - 1, "short tiles")
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(report.record), encoding="utf-8")
    used = load_tuning(path, CPU)
    key = TileKey(**decode["key"] | {"options": ()})
    assert find_tables(CPU).find(key, DEFAULT_TILES) == Tiles(16, 16, 8, 1)
    assert used.fingerprint != "default"


@few
@pytest.mark.extended
def test_a_choice_within_the_noise_is_not_taken() -> None:
    for share, is_taken in ((0.985, False), (0.97, True)):
        report, _ = run(
            jobs_of("decode"),
            lambda value, share=share: share if value.block_n == 16 else 1.0,
        )
        (choice,) = choices_of(report)
        assert (choice["block_n"] == 16) is is_taken
        assert report.record["rows"][0]["ratio"] == (share if is_taken else 1.0)


@few
@pytest.mark.extended
@pytest.mark.parametrize(("slow_round", "is_taken"), [(None, True), (2, False)])
def test_a_choice_that_is_slower_in_one_round_is_not_taken(
    slow_round: int | None, is_taken: bool
) -> None:
    """The last race, of two values, has five rounds."""
    last: list[int] = []

    def time(value: Tiles) -> float:
        if last.count(2) - 1 == slow_round and value.block_n == 16:
            return 1e3
        return narrow_is_fast(value)

    class CountingClock(ScriptedClock):
        def race(self, calls: Any, repeats: int) -> dict[Any, list[float]]:
            last.append(len(calls) if repeats == REPEATS else 0)
            return super().race(calls, repeats)

    report = tune_kernels(jobs_of("decode"), CountingClock(time), 1e6, CPU)
    assert last.count(2) == 5
    assert (choices_of(report)[0]["block_n"] == 16) is is_taken


def corrupt(
    monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[Launcher, Any], bool]
) -> None:
    """Let some launches write one wrong row."""
    launch = Launcher.__call__

    def launch_wrong(self: Launcher, *arguments: Any, **named: Any) -> None:
        launch(self, *arguments, **named)
        tensors = arguments[4]
        if is_wrong(self, tensors):
            tensors[6][-1] += 1

    monkeypatch.setattr(Launcher, "__call__", launch_wrong)


@few
def test_a_candidate_with_a_wrong_result_is_never_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corrupt(monkeypatch, lambda self, _: self._fixed["config"].BLOCK_N == 16)
    report, clock = run(jobs_of("decode"))
    assert choices_of(report)[0]["block_n"] == 32
    # those that are tried after it are right
    assert choices_of(report)[0]["num_warps"] == 8
    assert all("block_n=16" in sentence for sentence in report.wrong)
    assert any("block_n=16" in sentence for sentence in report.wrong)
    assert report.record["wrong"] == list(report.wrong)
    raced = [value for values in clock.raced for value in values]
    assert raced and all(value.block_n != 16 for value in raced)


@few
@pytest.mark.extended
def test_a_choice_that_is_wrong_at_other_lengths_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batches that are timed are right, and one that is only checked is not."""
    (job,) = jobs_of("decode")
    proof_lens = job.proofs[0].make().arguments["seq_lens"].tolist()

    def is_wrong(self: Launcher, tensors: Any) -> bool:
        is_proof = tensors[5].tolist() == proof_lens
        return is_proof and self._fixed["config"].BLOCK_N == 16

    corrupt(monkeypatch, is_wrong)
    report, _ = run([job])
    (row,) = report.record["rows"]
    assert row["choice"] == row["default"]
    assert len(report.wrong) == 1 and "lengths at edges" in report.wrong[0]


@few
def test_a_candidate_that_cannot_be_launched_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = Launcher.__call__

    def fail(self: Launcher, *arguments: Any, **named: Any) -> None:
        if self._chosen["num_warps"] == 8:
            raise RuntimeError("out of resources")
        launch(self, *arguments, **named)

    monkeypatch.setattr(Launcher, "__call__", fail)
    report, _ = run(jobs_of("decode"))
    assert choices_of(report)[0]["num_warps"] == 4
    assert report.skipped > 0 and report.record["skipped"] == {
        "RuntimeError": report.skipped
    }


@few
def test_a_default_that_is_wrong_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt(monkeypatch, lambda *_: True)
    report, clock = run(jobs_of("decode"))
    assert choices_of(report) == [] and len(report.wrong) == 1
    assert clock.raced == []


@few
@pytest.mark.extended
def test_the_time_limit_ends_a_run_between_jobs() -> None:
    jobs = jobs_of("decode", "small batch", "short_tiles", "min_segment")
    report, clock = run(jobs, seconds=40.0, race_seconds=1.0)
    finished = len(report.record["rows"])
    # a search ends within its share: the default and its neighbours, and the last race
    assert clock.seconds <= 50
    if finished < len(jobs):
        assert (
            report.ended == f"the time was over after {finished} of {len(jobs)} choices"
        )
    late, clock = run(jobs, seconds=3.0, race_seconds=1.0)
    assert late.ended == "the time was over after 1 of 4 choices"
    assert len(late.record["rows"]) == 1 and clock.seconds < 12
    none, clock = run(jobs, seconds=0.0)
    assert none.record["rows"] == [] and clock.raced == []


@few
@pytest.mark.extended
def test_an_interrupted_run_has_the_choices_that_were_finished() -> None:
    races = count()

    def interrupt() -> None:
        if clock_of_second[0] and next(races) > 0:
            raise KeyboardInterrupt

    clock_of_second = [False]
    words: list[int] = []

    def note(done: int, _: str) -> None:
        words.append(done)
        clock_of_second[0] = done == 1

    clock = ScriptedClock(narrow_is_fast, on_race=interrupt)
    report = tune_kernels(
        jobs_of("decode", "prefill"), clock, 1e6, CPU, on_progress=note
    )
    assert report.ended == "interrupted"
    assert [row["key"]["role"] for row in report.record["rows"]] == ["decode"]


@few
@pytest.mark.extended
def test_a_lost_device_ends_the_run_and_names_the_candidate() -> None:
    class LosingClock(ScriptedClock):
        lost = False

        def wait(self) -> None:
            if self.lost:
                raise RuntimeError("CUDA error: an illegal memory access\nmore")

    clock = LosingClock(narrow_is_fast)

    def lose() -> None:
        clock.lost = len(clock.raced) > 2

    clock.on_race = lose
    report = tune_kernels(jobs_of("decode", "prefill"), clock, 1e6, CPU)
    assert report.ended.startswith("the device was lost to a candidate of ")
    assert "illegal memory access" in report.ended and "\n" not in report.ended


@pytest.mark.extended
def test_candidates_are_compiled_in_threads_and_those_that_fail_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H100 is pretended, and kernels with 8 warps cannot be compiled."""
    launch = Path(__file__).parents[1] / "launch"
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{launch}{os.pathsep}{before}")
    (found,) = json_lines(Path(__file__).with_name("tuned_ahead.py"))
    assert found["ended"] == "complete" and found["wrong"] == []
    assert found["tried"] > 10 and found["skipped"] > 0
    # another number of programs needs no other kernel
    assert 1 < found["in_threads"] < found["tried"] and found["in_main"] == 0
    assert found["choice"]["num_warps"] == 4 and found["choice"]["programs"] == 4
    assert found["chip"]["multiprocessors"] == 132


@pytest.mark.extended
def test_the_limits_of_short_rests_are_measured_on_cascades() -> None:
    """The tiny batches have three requests, and the interpreter four multiprocessors."""
    jobs = jobs_of("short_rest_keys", "short_rest_programs")
    assert all("after a prefix of" in job.cases[0].name for job in jobs)
    report, _ = run(jobs, lambda value: 1.0 / value)
    assert report.wrong == () and report.ended == "complete"
    keys, programs = choices_of(report)
    assert keys == 4 * DEFAULT.thresholds.short_rest_keys and programs == 6.0


@few
def test_a_job_without_memory_is_left_out() -> None:
    def fail() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (decode,) = jobs_of("decode")
    large = replace(decode, cases=(TuningCase("large", fail),))
    report, _ = run([large, decode])
    assert report.ended == "complete" and len(report.record["rows"]) == 1
    assert report.record["skipped"] == {"OutOfMemoryError": 1}


@few
@pytest.mark.extended
def test_an_exhaustive_search_finds_what_no_step_leads_to() -> None:
    def time(value: Tiles) -> float:
        return 1.0 if (value.block_n, value.num_warps) == (16, 8) else 2.0

    jobs = jobs_of("decode")
    steps, _ = run(jobs, time)
    assert choices_of(steps)[0]["block_n"] == 32
    found, clock = run(jobs, time, is_exhaustive=True)
    assert choices_of(found)[0]["block_n"] == 16
    assert choices_of(found)[0]["num_warps"] == 8
    assert found.tried == 4
    assert max(map(len, clock.raced)) <= 9


def test_an_unknown_job_is_an_error_before_anything_is_measured() -> None:
    job = TuningJob("splits", JOBS[0].cases)
    with pytest.raises(ValueError, match="what = 'splits': expected one of decode, "):
        run([job])


def test_a_head_that_no_tile_takes_is_an_error() -> None:
    layer = TunedLayer(LayerSizes(2, 2, 2048), "float16", "auto", 1 << 30, 4)
    job = TuningJob("decode", layer.cases([((1, 1, 20),)]))
    with pytest.raises(NotImplementedError, match="head_size = 2048 is more than"):
        run([job])


KEYS = [
    TileKey("decode", 16, 128, 128, 2, "auto", True, ()),
    TileKey("prefill", 0, 128, 128, 2, "auto", True, ("window",)),
    TileKey("append", 64, 256, 256, 2, "fp8_e4m3", True, ()),
    TileKey("prefill", 0, 64, 64, 4, "auto", False, ()),
    TileKey("decode", 16, 128, 128, 2, "int4_per_token_head", True, ()),
]


@pytest.mark.parametrize("key", KEYS)
def test_candidates_fit_the_chip_and_steps_reach_all_of_them(key: TileKey) -> None:
    default = Tiles(key.rows or 64, 64, 4, 3)
    space = TileSpace(key, default, 2 if key.role == "decode" else 0, 99 * 1024)
    grid = space.grid()
    assert len(grid) == len(set(grid)) > 20
    for tiles in grid:
        assert estimate_shared_memory(key, tiles) <= 99 * 1024
        rows = key.rows or tiles.block_m
        numbers = rows * (tiles.block_n + key.value_size)
        assert numbers <= 224 * 32 * tiles.num_warps
    reached, new = {default}, {default}
    while new:
        new = {near for tiles in new for near in space.neighbours(tiles)} - reached
        reached |= new
    assert len(reached & {*grid}) >= 0.9 * len(grid)


def test_thresholds_are_doubled_and_halved() -> None:
    space = NumberSpace(20)
    assert space.grid() == [5, 10, 20, 40, 80]
    assert space.neighbours(20) == [10, 40] and space.neighbours(80) == [40]
    assert NumberSpace(2).grid() == [1, 2, 4, 8]
    assert NumberSpace(1.5).grid() == [0.375, 0.75, 1.5, 3.0, 6.0]


LLAMA = Layer(4, 8, 256, 512, True, None, 132)


def timed(bounds: tuple[int, int, int, int]) -> TimedBatch:
    by_rows = {16: 500.0, 32: 400.0, 64: 350.0, 128: 310.0, PREFILL: 300.0}
    return TimedBatch(
        str(bounds), LLAMA, BatchBounds(*bounds), (16, 32, 64, 128), 128, True, by_rows
    )


@pytest.mark.parametrize("rows", [64, 128, PREFILL])
def test_rates_are_those_that_choose_the_fastest_launches(rows: int) -> None:
    """The default chooses query tiles of 32 rows, and others take half of the time."""
    batch = timed((16, 128, 8, 8192))
    assert append_rows(batch, RATES) == 32
    times = {**dict.fromkeys(batch.times, 300.0), rows: 150.0}
    rates = fit_rates([replace(batch, times=times)], RATES)
    assert append_rows(batch, rates) == rows


def append_rows(batch: TimedBatch, rates: Rates) -> int:
    """Return what rates choose for a batch: rows of a query tile, or PREFILL."""
    numbered = replace(batch, times={rows: float(rows) for rows in batch.times})
    return int(numbered.time_with(rates))


def test_rates_stay_if_nothing_is_gained_or_another_batch_would_lose() -> None:
    batch = timed((16, 128, 8, 8192))
    alike = replace(batch, times=dict.fromkeys(batch.times, 300.0))
    assert fit_rates([alike], RATES) == RATES
    chosen = append_rows(batch, RATES)
    gains = replace(alike, times={**dict.fromkeys(batch.times, 200.0), chosen: 300.0})
    loses = replace(alike, times={**dict.fromkeys(batch.times, 320.0), chosen: 300.0})
    assert fit_rates([gains], RATES) != RATES
    assert fit_rates([gains, loses], RATES) == RATES


@pytest.mark.extended
def test_the_rates_of_a_run_are_in_its_file() -> None:
    report, _ = run(jobs_of("rates"), lambda rows: 100.0 + 10 * (rows != 32))
    (row,) = report.record["rows"]
    assert row["key"] == "rates" and row["choice"]["flop_per_us"]
    assert set(row["default_us"].values()) <= {100.0, 110.0}
    assert isinstance(Rates(**row["choice"]), Rates)
