"""Inputs and timing of the benchmark, and what becomes of a baseline that is wrong."""

import dataclasses
import random
import time
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import AsOurs, Plain, Scales, settings_of, small
from pagetwin.contract.cache_formats import find_format
from pagetwin.contract.operations import load_implementation
from pagetwin.tools.bench import Benchmark, load_workloads, timing
from pagetwin.tools.bench.accuracy import check_write, choose_rows, find_expected
from pagetwin.tools.bench.inputs import draw_inputs
from pagetwin.tools.bench.libraries.library import AttentionLibrary, Prepared
from pagetwin.tools.bench.libraries.ours import Ours
from pagetwin.tools.bench.results import Entry, ratio
from pagetwin.tools.bench.run import DeviceLost
from pagetwin.tools.bench.tables import error_notes, reasons
from pagetwin.tools.bench.timing import Stopwatch, captured, quartiles, time_interleaved

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)


def test_inputs_are_drawn_from_their_seed_and_scatter_the_blocks() -> None:
    workload = small("decode-256-ragged")
    one, again, other = (draw_inputs(workload, seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(one.query, again.query)
    assert torch.equal(one.block_table, again.block_table)
    assert not torch.equal(one.query, other.query)
    counts = [-(-kv // 16) for kv in workload.kv_lens]
    owned = [
        block
        for row, count in zip(one.block_table.tolist(), counts, strict=True)
        for block in row[:count]
    ]
    assert sorted(owned) == list(range(len(one.key_cache)))
    assert owned != sorted(owned)


def test_requests_of_a_cascade_share_the_blocks_of_their_prefix_and_no_other() -> None:
    workload = small("cascade-128x4k+256")
    inputs = draw_inputs(workload, 1, "cpu")
    shared = workload.shared_prefix // workload.block_size
    one, other = (row.tolist() for row in inputs.block_table)
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])
    assert sorted({*one, *other}) == list(range(len(inputs.key_cache)))


def test_queries_of_an_fp8_workload_are_numbers_of_fp8() -> None:
    query = draw_inputs(small("prefill-1x16k-fp8-vs-fa3"), 1, "cpu").query
    assert torch.equal(query.to(torch.float8_e4m3fn).to(query.dtype), query)
    query = draw_inputs(small("prefill-1x16k-fp8"), 1, "cpu").query
    assert not torch.equal(query.to(torch.float8_e4m3fn).to(query.dtype), query)


def test_rows_are_judged_all_over_a_batch() -> None:
    for name, workload in load_workloads().items():
        rows = choose_rows(workload)
        assert len(rows) <= 14 and rows == sorted(set(rows)), name
        assert 0 in rows and workload.tokens - 1 in rows
    ragged = load_workloads()["decode-256-ragged"]
    rows = choose_rows(ragged)
    for extreme in (min, max):
        wanted = extreme(ragged.kv_lens)
        assert wanted in [ragged.kv_lens[row] for row in rows]


@pytest.mark.parametrize(
    "name",
    [
        "decode-256-ragged",
        "decode-64x4k-swa",
        "cross-64x1500",
        "mixed-128x4k+2k",
        "prefill-4x3k-sinks-swa256-d64",
        "prefill-2x4k-alibi",
        "prefill-1x6k-cap30-d256",
        "prefill-1x8k-d192-v128",
        "mla-verify-q2-128h-64x4k",
        "cascade-128x4k+256",
    ],
)
def test_a_row_alone_is_right_as_it_is_in_its_batch(name: str) -> None:
    inputs = draw_inputs(small(name), 3, "cpu")
    expected = find_expected(inputs)
    prepared = Plain("cpu").prepare(inputs)
    found = expected.check(prepared.rows(prepared.call()), torch.bfloat16)
    assert found.ok and found.error < 5e-3


def test_a_row_that_was_not_written_is_found_wherever_it_is() -> None:
    inputs = draw_inputs(small("prefill-8x2k"), 0, "cpu")
    prepared = Plain("cpu").prepare(inputs)
    out = prepared.call()
    expected = find_expected(inputs)
    row = next(row for row in range(len(out)) if row not in expected.rows.tolist())
    out[row, 1] = torch.nan
    found = expected.check(out, torch.bfloat16)
    assert not found.ok and found.message.startswith(f"row {row} ")


@pytest.mark.parametrize("name", ["write-8k", "write-24k-fp8"])
def test_a_write_is_judged_by_every_byte(name: str) -> None:
    inputs = draw_inputs(small(name), 0, "cpu")
    inputs.poison_cache()
    rows = inputs.key_cache.flatten(0, 1), inputs.value_cache.flatten(0, 1)
    rows[0][inputs.slot_mapping] = inputs.key.to(rows[0].dtype)
    rows[1][inputs.slot_mapping] = inputs.value.to(rows[1].dtype)
    assert check_write(inputs).ok
    nobodys = next(
        slot for slot in range(len(rows[0])) if slot not in inputs.slot_mapping.tolist()
    )
    rows[1][nobodys, 0, 0] = 0
    assert check_write(inputs).message == f"value at slot {nobodys} is wrong"


@pytest.mark.parametrize(
    "name", ["write-8k-int8-page", "write-8k-fp8-token", "write-8k-nvfp4-page"]
)
def test_a_write_of_codes_is_judged_by_every_byte_of_codes_and_scales(
    name: str,
) -> None:
    workload = load_workloads("formats")[name].tiny()
    inputs = draw_inputs(workload, 0, "cpu")
    inputs.poison_cache()
    reference: Any = load_implementation("reference")
    caches = (inputs.key_cache, inputs.value_cache)
    reference.reshape_and_cache(
        inputs.key, inputs.value, *caches, inputs.slot_mapping, *inputs.scales, None,
        *inputs.global_scales,
    )  # fmt: skip
    assert check_write(inputs).ok
    slot = int(inputs.slot_mapping[0])
    place = divmod(slot, workload.block_size)
    assert inputs.v_scale is not None
    codes = inputs.value_cache.view(torch.uint8)
    codes[place][0, 0] ^= 1
    found = check_write(inputs)
    assert found.message == f"value at slot {slot} is wrong"
    # a code next to the nearest has an error, a slot without a token has none
    assert 0 < found.error < 0.05
    # a key that is off does not hide what is wrong with values
    inputs.key_cache.view(torch.uint8)[place][0, 0] ^= 1
    assert 0 < check_write(inputs).error < 0.05
    nobodys = next(
        at for at in range(codes[..., 0, 0].numel()) if at not in inputs.slot_mapping
    )
    codes[divmod(nobodys, workload.block_size)][0, 0] ^= 1
    assert check_write(inputs).error == 0
    codes[divmod(nobodys, workload.block_size)][0, 0] ^= 1
    inputs.key_cache.view(torch.uint8)[place][0, 0] ^= 1
    row = inputs.v_scale[place][0]
    row.copy_(row.float() * 2)
    found = check_write(inputs)
    assert found.message == f"value at slot {slot} is wrong" and found.error > 0.05


@pytest.mark.parametrize("form", ["int8", "fp8-token", "int4", "nvfp4"])
def test_a_workload_of_codes_has_the_numbers_of_its_format(form: str) -> None:
    workload = load_workloads("formats")[f"decode-64x4k-{form}"].tiny()
    inputs = draw_inputs(workload, 0, "cpu")
    assert workload.form is not None
    assert find_format(inputs.key_cache.dtype, inputs.k_scale) == workload.form
    key, value = inputs.numbers(slice(None), torch.float32)
    assert key.shape == value.shape == (*inputs.key_cache.shape[:3], 32)
    # they are drawn from a normal distribution
    assert 0.8 < float(key.std()) < 1.2
    row = workload.form.page_bytes(1, workload.kv_heads, 32, 32, workload.dtype)
    both = 2 * workload.tokens * workload.query_heads * 32 * 2
    assert workload.bytes == sum(workload.kv_lens) * row + both


def test_everyone_has_one_turn_after_the_other() -> None:
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in ("a", "b", "c")}
    times = time_interleaved(calls, 8, random.Random(0), Stopwatch("cpu"))
    assert {name: len(host_times) for name, host_times in times.items()} == {
        name: 8 for name in calls
    }
    turns = [tuple(seen[place : place + 3]) for place in range(0, 24, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 2


def test_host_times_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, a library met a slow second of the host that another one did not."""
    monkeypatch.setattr(timing, "SHORT_CALL", 0.05)
    seen: list[str] = []

    def slow() -> None:
        seen.append("slow")
        time.sleep(0.06)

    calls = {name: lambda name=name: seen.append(name) for name in ("a", "b")}
    times = timing.time_hosts({**calls, "slow": slow}, 6, random.Random(0))
    assert times["slow"] >= 60_000 > max(times["a"], times["b"]) > 0
    # after two calls of each, ten of a short call and one of a slow one
    turns = [tuple(seen[place : place + 21]) for place in range(6, len(seen), 21)]
    runs = [
        [(name, len(list(calls))) for name, calls in groupby(turn)] for turn in turns
    ]
    assert len(runs) == 6 and len(set(turns)) > 2
    assert all(
        sorted(counted) == [("a", 10), ("b", 10), ("slow", 1)] for counted in runs
    )


def test_quartiles_stay_within_what_was_measured() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)


def test_a_ratio_is_taken_round_by_round() -> None:
    """A card that grew hot in the last round slowed both, and says nothing of either."""
    ours = Entry(rounds=[[10.0], [10.0], [20.0]])
    peer = Entry(rounds=[[20.0], [20.0], [40.0]])
    assert ratio(ours, peer) == 0.5
    assert ratio(Entry(), peer) is None


def test_a_call_that_cannot_be_captured_is_not_an_error(monkeypatch: Any) -> None:
    class Graph:
        def __init__(self) -> None:
            self.replay = lambda: None

    class Capturing:
        def __init__(self, graph: Graph) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            return None

        def __exit__(self, *error: object) -> None:
            return None

    def reject() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert captured(reject) is None
    found = captured(lambda: 7)
    assert found is not None and found.result == 7


class DropsTheLastKey(Plain):
    name = "drops"

    def prepare(self, inputs: Any) -> Prepared:
        inputs.seq_lens.sub_(1)
        try:
            prepared = super().prepare(inputs)
            out = prepared.call().clone()
        finally:
            inputs.seq_lens.add_(1)
        return Prepared(lambda: out)


class WritesNothing(Plain):
    name = "silent"

    def prepare(self, inputs: Any) -> Prepared:
        out = inputs.fresh()
        return Prepared(lambda: out)


class Raises(Plain):
    name = "raises"

    def change(self, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nsecond line")


def test_who_is_wrong_is_reported_and_not_timed() -> None:
    everyone = [AsOurs("cpu"), Plain("cpu")]
    everyone += [library("cpu") for library in (Scales, WritesNothing, Raises)]
    record = Benchmark(settings_of("decode-16x512"), everyone).run()
    results = record["workloads"][0]["results"]
    assert results["ours"]["status"] == results["plain"]["status"] == "timed"
    for name, words in (("scales", "budget"), ("silent", "was not written")):
        assert results[name]["status"] == "wrong"
        assert words in results[name]["reason"]
        assert "median_us" not in results[name]
    assert results["raises"]["status"] == "failed"
    assert results["raises"]["reason"] == "RuntimeError: no kernel image is available"
    assert sum("wrong in decode-16x512" in line for line in reasons(record)) == 2


def test_a_kernel_that_forgets_a_key_of_eight_is_wrong() -> None:
    """8 keys: with 4,096 random ones no comparison could tell, which is why laws exist."""
    everyone = [AsOurs("cpu"), DropsTheLastKey("cpu")]
    record = Benchmark(settings_of("decode-16x512"), everyone).run()
    assert record["workloads"][0]["results"]["drops"]["status"] == "wrong"


@pytest.fixture
def pretended(monkeypatch: Any) -> Any:
    """Let a run on the host go the ways of one on a GPU; return how graphs are captured."""
    from pagetwin.tools.bench import run, timing

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.when = 0.0

        def record(self) -> None:
            self.when = time.perf_counter()

        def elapsed_time(self, other: "Event") -> float:
            return 1e3 * (other.when - self.when)

    def capture(call: Any) -> timing.Captured:
        result = call()
        if result is None:
            return timing.Captured(call, None)
        return timing.Captured(lambda: result.copy_(call().clone()), result)

    chosen = SimpleNamespace(capture=capture)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(run, "captured", lambda call: chosen.capture(call))
    return chosen


def measure_as_on_a_gpu(
    *everyone: AttentionLibrary, name: str = "decode-16x512"
) -> Any:
    """Return the results of one round, judged and timed as on a GPU."""
    bench = Benchmark(settings_of(name, repeats=4), list(everyone))
    stopwatch = Stopwatch("cpu")
    stopwatch.on_gpu = True
    bench._measure(bench.settings.workloads[0], 0, random.Random(0), stopwatch)
    return bench.record()["workloads"][0]["results"]


def test_on_a_gpu_what_is_timed_is_the_graph_that_was_judged(pretended: Any) -> None:
    results = measure_as_on_a_gpu(AsOurs("cpu"), Plain("cpu"))
    for entry in results.values():
        assert entry["status"] == "timed", entry
        assert entry["graph"] and entry["runs"] == 4 and entry["host_us"] > 0


def test_a_graph_that_computes_nothing_is_wrong(pretended: Any) -> None:
    """It would be the fastest of all: its output is still right from the call before."""
    from pagetwin.tools.bench.timing import Captured

    pretended.capture = lambda call: Captured(lambda: None, call())
    results = measure_as_on_a_gpu(AsOurs("cpu"))
    assert results["ours"]["status"] == "wrong"
    assert "row 0 was not written" in results["ours"]["reason"]


def test_what_cannot_be_captured_is_timed_as_a_call_and_says_so(pretended: Any) -> None:
    pretended.capture = lambda call: None
    results = measure_as_on_a_gpu(AsOurs("cpu"))
    assert results["ours"]["status"] == "timed" and not results["ours"]["graph"]


@pytest.mark.extended
def test_a_write_is_judged_after_the_graph_too(pretended: Any) -> None:
    results = measure_as_on_a_gpu(Ours("cpu"), name="write-8k")
    assert results["ours"]["status"] == "timed", results
    assert results["ours"]["graph"]


def test_a_lost_device_ends_the_run_and_names_who_lost_it(
    pretended: Any, monkeypatch: Any
) -> None:
    run = Benchmark(settings_of("decode-16x512"), [AsOurs("cpu"), Raises("cpu")])
    monkeypatch.setattr(
        run, "settings", dataclasses.replace(run.settings, device="cuda")
    )

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="lost to raises in decode-16x512"):
        run._check_device("raises", run.settings.workloads[0])


class RoundsToFP8(Plain):
    name = "coarse"

    def prepare(self, inputs: Any) -> Prepared:
        return dataclasses.replace(super().prepare(inputs), rounds_more=True)

    def change(self, out: torch.Tensor) -> torch.Tensor:
        return out.mul_(1.08)


def test_a_baseline_that_rounds_to_fp8_is_timed_where_its_error_is_shown() -> None:
    """The standard suite has no aims, and does not time it."""
    everyone = [AsOurs("cpu"), RoundsToFP8("cpu"), Scales("cpu")]
    names = ("decode-16x512", "decode-2x2k")
    record = Benchmark(settings_of(*names, suite="all"), everyone).run()
    standard, extended = (workload["results"] for workload in record["workloads"])
    assert standard["coarse"]["status"] == "wrong"
    assert extended["coarse"]["status"] == "timed"
    assert extended["coarse"]["within_budget"] is False
    assert extended["scales"]["status"] == "wrong"
    (note,) = error_notes(record)
    assert "coarse in decode-2x2k" in note and "relative error 0.08" in note
