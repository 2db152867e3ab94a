"""Does the benchmark time the right thing, and say so when something else is wrong?"""

import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.tools.bench import Benchmark, choose_settings, load_workloads
from pagetwin.tools.bench.accuracy import (
    Finding,
    check_write,
    choose_rows,
    find_expected,
)
from pagetwin.tools.bench.ceilings import Ceilings
from pagetwin.tools.bench.inputs import draw_inputs
from pagetwin.tools.bench.libraries import all_libraries, choose_libraries
from pagetwin.tools.bench.libraries.flash_attention_3 import FlashAttention3
from pagetwin.tools.bench.libraries.flash_mla import FlashMLA
from pagetwin.tools.bench.libraries.launches import watch_launches
from pagetwin.tools.bench.libraries.library import (
    AttentionLibrary,
    Declined,
    Prepared,
)
from pagetwin.tools.bench.libraries.ours import Ours
from pagetwin.tools.bench.results import BenchStatus, Entry, ratio, workload_record
from pagetwin.tools.bench.run import DeviceLost
from pagetwin.tools.bench.settings import BenchSettings
from pagetwin.tools.bench.tables import aim_table, error_notes, markdown, reasons
from pagetwin.tools.bench.timing import Stopwatch, captured, quartiles, time_interleaved
from pagetwin.tools.bench.workloads import Workload, best_published, published_figures
from pagetwin.tools.cli import USER_ERROR, app
from typer.testing import CliRunner

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)
CEILINGS = Ceilings(4000.0, 3900.0, 3800.0, 800.0, 4.0)
NAMES = [
    "decode-64x4k",
    "decode-256-ragged",
    "decode-8x32k",
    "decode-1x128k",
    "decode-16x512",
    "decode-64x4k-mha",
    "decode-64x4k-fp8",
    "decode-64x4k-swa",
    "verify-64x4k-q4",
    "cross-64x1500",
    "prefill-1x8k",
    "prefill-8x2k",
    "prefill-1x8k-d64",
    "chunk-2k-on-30k",
    "mixed-128x4k+2k",
    "encoder-32x1500",
    "write-8k",
]


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(word) for word in words)])


def small(name: str) -> Workload:
    return load_workloads("all")[name].tiny()


def settings_of(*names: str, **others: Any) -> BenchSettings:
    return choose_settings(names, device="cpu", smoke=True, **others)


class Plain(AttentionLibrary):
    """Right, by the reference; a child of it breaks something."""

    name, title = "plain", "the reference"

    def prepare(self, inputs: Any) -> Prepared:
        from pagetwin.reference.attention.paged import paged_attention

        if inputs.workload.kind in ("encoder", "write"):
            raise Declined("only pages")
        out = inputs.fresh()
        batch = (inputs.block_table, inputs.query_start_loc, inputs.seq_lens)
        lens = (inputs.max_query_len, inputs.max_seq_len)
        return Prepared(
            lambda: self.change(
                paged_attention(
                    inputs.query,
                    inputs.key_cache,
                    inputs.value_cache,
                    *batch,
                    *lens,
                    out=out,
                    scale=inputs.workload.scale,
                    options=inputs.options(),
                )
            )
        )

    def change(self, out: torch.Tensor) -> torch.Tensor:
        return out


class AsOurs(Plain):
    """Under our name, so that a run needs no interpreter."""

    name = "ours"


# the workloads


def test_the_workloads_are_the_seventeen_that_were_agreed_on() -> None:
    workloads = load_workloads()
    assert list(workloads) == NAMES
    assert set(published_figures("NVIDIA H200")["workloads"]) == set(NAMES)
    lens = {
        name: set(zip(w.query_lens, w.kv_lens, strict=True))
        for name, w in workloads.items()
    }
    assert lens["decode-64x4k"] == {(1, 4096)}
    assert lens["verify-64x4k-q4"] == {(4, 4096)}
    assert lens["chunk-2k-on-30k"] == {(2048, 32768)}
    assert workloads["mixed-128x4k+2k"].kv_lens == (4096,) * 128 + (8192,)
    assert workloads["mixed-128x4k+2k"].query_lens == (1,) * 128 + (2048,)
    assert workloads["decode-64x4k-fp8"].is_quantised
    assert workloads["decode-64x4k-swa"].sliding_window == 1024
    assert not workloads["cross-64x1500"].causal
    heads = {(w.query_heads, w.kv_heads, w.head_size) for w in workloads.values()}
    assert heads == {(32, 8, 128), (32, 32, 128), (64, 8, 64), (20, 20, 64)}
    assert {w.block_size for w in workloads.values()} == {16}


def test_the_ragged_lengths_are_those_of_the_distribution_that_is_named() -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(1500), 0.8, 256)
    right = np.clip(np.round(drawn), 16, 16384).astype(int).tolist()
    found = load_workloads()["decode-256-ragged"]
    assert list(found.kv_lens) == right
    assert set(found.query_lens) == {1}


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    one = Workload("", "decode", "", (2,), (10,), 2, 1, 8, sliding_window=4)
    assert one.bytes == 5 * (8 + 8) * 2 + 2 * 2 * (8 + 8) * 2 == 288
    assert one.flops == 4 * 8 * 2 * (4 + 4) == 512
    prefill = Workload("", "prefill", "", (3, 1), (3, 2), 4, 2, 8)
    assert prefill.flops == 4 * 8 * 4 * ((1 + 2 + 3) + 2)
    assert prefill.bytes == (3 + 2) * 2 * 16 * 2 + 4 * 4 * 16 * 2
    cross = Workload("", "cross", "", (2,), (5,), 1, 1, 8, causal=False)
    assert cross.flops == 4 * 8 * 2 * 5
    write = Workload("", "write", "", (3,), (3,), 1, 2, 8)
    assert (write.bytes, write.flops) == (3 * 2 * 16 * (2 + 2), 0)
    eight_bits = Workload(
        "", "decode", "", (1,), (10,), 1, 1, 8, kv_dtype=torch.float8_e4m3fn
    )
    assert eight_bits.bytes == 10 * 16 + 16 * 2


def test_bytes_and_operations_of_the_workloads_are_those_counted_by_hand() -> None:
    workloads = load_workloads()
    decode = workloads["decode-64x4k"]
    assert decode.bytes == 64 * (4096 * 8 * 256 * 2 + 32 * 256 * 2)
    assert decode.flops == 64 * 4096 * 32 * 4 * 128
    assert workloads["decode-64x4k-fp8"].bytes == 64 * (4096 * 8 * 256 + 32 * 256 * 2)
    window = workloads["decode-64x4k-swa"]
    assert window.bytes == 64 * (1024 * 8 * 256 * 2 + 32 * 256 * 2)
    prefill = workloads["prefill-1x8k"]
    assert prefill.flops == 8192 * 8193 // 2 * 32 * 4 * 128
    chunk = workloads["chunk-2k-on-30k"]
    seen = sum(range(32768 - 2048 + 1, 32768 + 1))
    assert chunk.flops == seen * 32 * 4 * 128
    encoder = workloads["encoder-32x1500"]
    assert encoder.flops == 32 * 1500 * 1500 * 20 * 4 * 64
    assert workloads["write-8k"].bytes == 8192 * 8 * 256 * (2 + 2)


def test_the_floor_is_the_longest_of_reads_operations_and_launch() -> None:
    workloads = load_workloads()
    us, what = CEILINGS.floor(workloads["decode-64x4k"])
    assert what == "reads"
    assert us == pytest.approx(workloads["decode-64x4k"].bytes / 4e6)
    us, what = CEILINGS.floor(workloads["prefill-1x8k"])
    assert what == "operations"
    assert us == pytest.approx(workloads["prefill-1x8k"].flops / 8e8)
    us, what = CEILINGS.floor(workloads["write-8k"])
    assert what == "copies"
    assert us == pytest.approx(workloads["write-8k"].bytes / 3.8e6)
    assert CEILINGS.floor(small("decode-16x512")) == (4.0, "launch")


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_workload_keeps_what_makes_it_one(name: str) -> None:
    full, tiny = load_workloads()[name], small(name)
    assert tiny.kind == full.kind and tiny.causal == full.causal
    assert tiny.is_ragged == full.is_ragged and tiny.kv_dtype == full.kv_dtype
    assert (tiny.sliding_window is None) == (full.sliding_window is None)
    assert (tiny.query_heads > tiny.kv_heads) == (full.query_heads > full.kv_heads)
    assert max(tiny.kv_lens) <= 48 and len(tiny.kv_lens) <= 2
    assert all(new <= kv for new, kv in zip(tiny.query_lens, tiny.kv_lens, strict=True))
    same = [new == kv for new, kv in zip(full.query_lens, full.kv_lens, strict=True)]
    assert all(same) == all(
        new == kv for new, kv in zip(tiny.query_lens, tiny.kv_lens, strict=True)
    )


def test_published_figures_are_of_one_gpu_and_leave_out_what_is_inaccurate() -> None:
    assert published_figures("NVIDIA A100") is None
    stored = published_figures("NVIDIA H200")
    assert best_published(stored, "decode-64x4k") == ("flashinfer", 262)
    assert best_published(stored, "decode-64x4k-fp8") == ("flashinfer", 261)
    assert best_published(stored, "decode-16x512") == ("xqa", 20.3)
    assert best_published(stored, "write-8k") == ("vllm", 30.7)
    assert stored["source"] == "NVIDIA H200, torch 2.11+cu130, Triton 3.6, 2026-11-20"


def test_the_extended_suite_has_baselines_and_aims_and_no_standard_workload() -> None:
    standard, extended = (load_workloads(each) for each in ("standard", "extended"))
    assert len(extended) == 34 and not standard.keys() & extended.keys()
    assert list(load_workloads("all")) == [*standard, *extended]
    libraries = {each.name for each in all_libraries("cpu", suite="extended")}
    for each in extended.values():
        assert each.aim is not None and 0.5 <= each.aim <= 1.1, each.name
        assert set(each.baselines) <= libraries, each.name
        assert each.about and each.source, each.name
    assert all(each.aim is None for each in standard.values())


def test_the_drawn_lengths_of_the_extended_suite_are_those_of_their_generators() -> (
    None
):
    workloads = load_workloads("extended")
    short = np.random.default_rng(1).integers(30, 700, 48).tolist()
    assert list(workloads["prefill-48-short"].kv_lens) == short
    assert list(workloads["prefill-48-short"].query_lens) == short
    encoder = np.random.default_rng(2).integers(200, 2000, 24).tolist()
    assert list(workloads["encoder-24-ragged"].kv_lens) == encoder
    mixed = workloads["mixed-100+6"]
    decodes = np.random.default_rng(3).integers(512, 12288, 100).tolist()
    assert list(mixed.kv_lens[:100]) == decodes and set(mixed.query_lens[:100]) == {1}
    random = np.random.default_rng(4)
    news, before = random.integers(256, 1024, 6), random.integers(0, 6144, 6)
    assert list(mixed.query_lens[100:]) == news.tolist()
    assert list(mixed.kv_lens[100:]) == (news + before).tolist()


def test_bytes_and_operations_of_the_extended_suite_are_those_counted_by_hand() -> None:
    workloads = load_workloads("extended")
    latent = workloads["mla-decode-128h-32x8k"]
    assert latent.bytes == 32 * (8192 * 576 * 2 + 128 * (576 + 512) * 2)
    assert latent.flops == 32 * 8192 * 128 * 2 * (576 + 512)
    assert latent.scale == pytest.approx(192**-0.5)
    cascade = workloads["cascade-128x4k+256"]
    assert cascade.bytes == (4096 + 128 * 256) * 8 * 256 * 2 + 128 * 32 * 256 * 2
    assert cascade.flops == 128 * 4352 * 32 * 4 * 128
    wide = workloads["prefill-1x8k-d192-v128"]
    assert wide.flops == 8192 * 8193 // 2 * 32 * 2 * (192 + 128)
    assert wide.bytes == 8192 * 32 * (192 + 128) * 2 * 2
    window = workloads["prefill-1x24k-swa2k"]
    seen = sum(min(position + 1, 2048) for position in range(24576))
    assert window.flops == seen * 32 * 4 * 128
    write = workloads["write-24k-fp8"]
    assert write.bytes == 24576 * 8 * 256 * (2 + 1)


# inputs and judging


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
    caches = (inputs.key_cache, inputs.value_cache)
    assert check_write(inputs, caches).ok
    nobodys = next(
        slot for slot in range(len(rows[0])) if slot not in inputs.slot_mapping.tolist()
    )
    rows[1][nobodys, 0, 0] = 0
    assert check_write(inputs, caches).message == f"value at slot {nobodys} is wrong"


# timing


def test_everyone_has_one_turn_after_the_other() -> None:
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in ("a", "b", "c")}
    times = time_interleaved(calls, 8, random.Random(0), Stopwatch("cpu"))
    assert {name: len(each) for name, each in times.items()} == {
        name: 8 for name in calls
    }
    turns = [tuple(seen[place : place + 3]) for place in range(0, 24, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 2


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


def test_a_call_that_cannot_be_captured_is_no_error(monkeypatch: Any) -> None:
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

    def refuse() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert captured(refuse) is None
    found = captured(lambda: 7)
    assert found is not None and found.result == 7


# a run


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


def test_a_smoke_run_does_every_workload_right(smoke: Any) -> None:
    assert smoke.result.exit_code == 0, smoke.result.output
    record = smoke.record
    assert record["complete"] and record["smoke"]
    assert [each["name"] for each in record["workloads"]] == NAMES
    for each in record["workloads"]:
        ours = each["results"]["ours"]
        assert ours["status"] == "timed", each["name"]
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


def test_a_smoke_run_does_every_extended_workload_right(extended_smoke: Any) -> None:
    assert extended_smoke.result.exit_code == 0, extended_smoke.result.output
    record = extended_smoke.record
    workloads = load_workloads("extended")
    assert [each["name"] for each in record["workloads"]] == list(workloads)
    for each in record["workloads"]:
        ours = each["results"]["ours"]
        assert ours["status"] == "timed" and ours["share_of_budget"] <= 1, each["name"]
        for name in workloads[each["name"]].baselines:
            status = each["results"].get(name, {}).get("status")
            assert status == ("timed" if name.startswith("ours") else status)
        if each["kind"] == "write":
            assert each["results"]["torch-index"]["status"] == "timed"
            assert "kernels" not in ours
        else:
            assert all(kernel.startswith("portable ") for kernel in ours["kernels"])


def test_a_smoke_run_prints_kernels_and_aims(extended_smoke: Any) -> None:
    output = extended_smoke.result.output
    assert "0 of 34 aims are met; 34 have no ratio" in output
    assert "ours-bf16 declined in all but prefill-1x16k-fp8" in output
    (line,) = (each for each in output.splitlines() if each.startswith("mixed-100+6:"))
    assert line.endswith("(portable decode + portable prefill)")


def test_a_smoke_run_says_that_its_times_mean_nothing(smoke: Any) -> None:
    assert smoke.record["meaningless"] == "interpreter"
    assert "whose times have no meaning" in smoke.result.output
    for line in smoke.result.output.splitlines():
        if line.startswith("decode-64x4k:"):
            assert "ours interpreter" in line and " us" not in line
    page = smoke.files["md"].read_text()
    assert "the times have no meaning" in page
    assert not any(each["best_peer"] for each in smoke.record["workloads"])


def test_who_is_missing_or_declines_is_listed_with_the_reason(smoke: Any) -> None:
    for text in (smoke.result.output, smoke.files["md"].read_text()):
        assert "fa3 missing: needs a CUDA device" in text
        assert "torch-flash declined in write-8k" in text
    entries = {
        each["name"]: each["results"]["torch-flash"]
        for each in smoke.record["workloads"]
    }
    assert entries["decode-256-ragged"]["status"] == "declined"
    assert "differ in length" in entries["decode-256-ragged"]["reason"]
    assert entries["decode-64x4k"]["note"] == "dense: keys gathered in advance"
    assert not entries["decode-64x4k"]["same_work"]
    assert entries["encoder-32x1500"]["same_work"]


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
    assert all(len(each["seeds"]) == 1 for each in record["workloads"])
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


def test_a_plot_is_drawn_for_light_and_for_dark_pages(smoke: Any) -> None:
    light, dark = (
        (smoke.folder / f"bench{name}.svg").read_text() for name in ("", "-dark")
    )
    assert "<svg" in light and "<svg" in dark and light != dark


def test_xformers_is_asked_as_the_backend_asks_it(xformers: None) -> None:
    everyone = choose_libraries(all_libraries("cpu"), ["xformers"])
    assert [each.name for each in everyone] == ["ours", "xformers"]
    libraries = [AsOurs("cpu"), everyone[1]]
    record = Benchmark(settings_of("decode-16x512", "write-8k"), libraries).run()
    decode, write = (each["results"]["xformers"] for each in record["workloads"])
    assert decode["status"] == "timed", decode
    assert write["reason"] == "its paged operator is for decodes"


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


class Scales(Plain):
    name = "scales"

    def change(self, out: torch.Tensor) -> torch.Tensor:
        return out.mul_(1.5)


class Raises(Plain):
    name = "raises"

    def change(self, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nsecond line")


def test_who_is_wrong_is_reported_and_not_timed() -> None:
    everyone = [AsOurs("cpu"), Plain("cpu")]
    everyone += [each("cpu") for each in (Scales, WritesNothing, Raises)]
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
    """8 keys: with 4,096 random ones nobody could tell, which is why there are laws."""
    everyone = [AsOurs("cpu"), DropsTheLastKey("cpu")]
    record = Benchmark(settings_of("decode-16x512"), everyone).run()
    assert record["workloads"][0]["results"]["drops"]["status"] == "wrong"


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
    statuses = [each["results"]["plain"]["status"] for each in record["workloads"]]
    assert statuses == ["timed", "not run", "not run"]
    assert "plain not run in decode-64x4k-swa, write-8k: interrupted" in reasons(record)
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_a_peer_that_takes_the_process_with_it_leaves_the_record(
    tmp_path: Path,
) -> None:
    """What a segmentation fault would leave is what stands in the file when it is called."""
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
    assert {each["results"]["ours"]["status"] for each in record["workloads"]} == {
        "not run"
    }


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


def test_kernels_are_named_by_the_plans_that_were_launched() -> None:
    """The plan cache of other calls keeps its plans."""
    from pagetwin.optimized.launch import dispatch

    twin = load_implementation("optimized")
    cached = dispatch.PLANS
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
    assert dispatch.PLANS is cached


def test_a_decode_of_the_hopper_fp8_kernel_is_not_named_portable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is launched by the portable plan, whose name the report gave it."""
    from pagetwin.optimized.launch import dispatch, launcher
    from pagetwin.optimized.launch.launches import Launches
    from pagetwin.optimized.launch.prepare import sm90_fp8

    monkeypatch.setattr(launcher.Launcher, "__call__", lambda *_: None)
    # the smallest batches have a portable kernel of their own
    monkeypatch.setattr(Launches, "is_short", lambda *_: False)
    found = []
    for is_supported in (True, False):
        monkeypatch.setattr(sm90_fp8, "supports", lambda *_, it=is_supported: it)
        monkeypatch.setattr(dispatch, "PLANS", type(dispatch.PLANS)(2))
        library = Ours("cpu")
        prepared = library.prepare(draw_inputs(small("decode-64x4k-fp8"), 0, "cpu"))
        with library.watch() as names:
            prepared.call()
        found += names
    assert found == ["sm90.fp8_decode decode", "portable decode"]


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
    standard, extended = (each["results"] for each in record["workloads"])
    assert standard["coarse"]["status"] == "wrong"
    assert extended["coarse"]["status"] == "timed"
    assert extended["coarse"]["within_budget"] is False
    assert extended["scales"]["status"] == "wrong"
    (note,) = error_notes(record)
    assert "coarse in decode-2x2k" in note and "relative error 0.08" in note


# a record of a GPU, which there is none of here


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
        for peer, each in times.items():
            us = each[place]
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


def test_ratios_stand_beside_the_best_peer_and_beside_what_was_published(
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


def test_the_page_shows_the_newest_record_or_says_that_there_is_none(
    gpu_record: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "docs" / "hooks"))
    import bench_table

    assert bench_table.bench_table(tmp_path) == "*No run is recorded yet.*"
    (tmp_path / "2026-11-20-a-bench.json").write_text("{}")
    newest = tmp_path / "2026-11-21-a-bench.json"
    newest.write_text(json.dumps(gpu_record))
    page = bench_table.bench_table(tmp_path)
    assert "NVIDIA H200" in page and "| decode-64x4k | 260 | 265 | 200 |" in page
    machine = gpu_record["machine"]
    earlier = {"device": "NVIDIA H100", "date": "2026-11-19T10:00:00+00:00"}
    other = gpu_record | {"machine": machine | earlier}
    (tmp_path / "2026-11-19-b-bench.json").write_text(json.dumps(other))
    page = bench_table.bench_table(tmp_path)
    assert page.index("NVIDIA H200") < page.index("NVIDIA H100")
    assert page.count("| decode-64x4k | 260 |") == 2
    assert all(name in bench_table.bench_workloads() for name in NAMES)
    assert "(176)" in bench_table.bench_published()
    assert "`mla-decode-16h-256x1k`" in bench_table.bench_extended_workloads()


def test_the_page_shows_the_aims_of_the_extended_record(
    gpu_record: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "docs" / "hooks"))
    import bench_table

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
    file = tmp_path / "2026-11-22-a-bench-extended.json"
    file.write_text(json.dumps(gpu_record | {"workloads": [made]}))
    page = bench_table.bench_extended(tmp_path)
    row = "90.0 | fa3 | (100) | 0.900 | 1.00 | yes | sm90 prefill |"
    assert f"| prefill-1x16k-fp8-vs-fa3 | {row}" in page
    assert "1 of 1 aims are met." in page and "relative error 0.04" in page
    assert bench_table.bench_table(tmp_path) == "*No run is recorded yet.*"


# a peer that is not here


def test_arguments_of_flash_attention_3_go_by_their_names() -> None:
    """An operator that gained an argument that may be left out still gets the others right."""
    library = torch.library.Library("pagetwin_fake_fa3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? later, Tensor? out, Tensor?"
        " cu_seqlens_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor?"
        " page_table, float softmax_scale, bool is_causal, int window_size_left, int"
        " window_size_right, float softcap, Tensor? scheduler_metadata, int num_splits)"
        " -> Tensor"
    )
    library.define(
        "get_scheduler_metadata(int batch_size, int num_heads, int num_heads_k, int"
        " headdim, ScalarType qkv_dtype, Tensor seqused_k, int? page_size, bool is_causal,"
        " bool? pack_gqa) -> Tensor"
    )
    seen: dict[str, Any] = {}

    def fwd(q, k, v, later, out, starts, lens, most_q, most_k, table, *rest):  # type: ignore[no-untyped-def]
        from pagetwin.reference.attention.paged import paged_attention

        seen["rest"], seen["later"] = rest, later
        out.copy_(paged_attention(q, k, v, table, starts, lens, most_q, most_k))
        return out.clone()

    def plan(batch, heads, kv_heads, size, dtype, lens, page, causal, pack):  # type: ignore[no-untyped-def]
        seen["plan"] = (batch, heads, kv_heads, size, page, causal, pack)
        return torch.zeros(1)

    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", plan, "CPU")
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops.pagetwin_fake_fa3
    inputs = draw_inputs(small("decode-256-ragged"), 0, "cpu")
    prepared = peer.prepare(inputs)
    found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
    assert found.ok, found.message
    assert seen["later"] is None
    assert seen["plan"] == (2, 4, 2, 32, 16, True, None)
    scale, causal, left, right, cap, metadata, splits = seen["rest"]
    assert (causal, left, right, cap, splits) == (True, -1, -1, 0.0, 0)
    assert scale == pytest.approx(32**-0.5) and metadata is not None


@pytest.fixture
def operators_of_flash_attention_3() -> Any:
    """Return operators with FlashAttention-3's arguments, computed by the reference."""
    from pagetwin.reference.attention.paged import paged_attention

    library = torch.library.Library("pagetwin_option_fa3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q,"
        " Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,"
        " float softmax_scale, bool is_causal, int window_size_left, float softcap, Tensor?"
        " s_aux) -> Tensor[]"
    )
    library.define(
        "get_scheduler_metadata(int batch_size, int headdim, int headdim_v, bool has_softcap)"
        " -> Tensor"
    )
    plans: list[tuple[Any, ...]] = []

    def fwd(
        q,
        k,
        v,
        q_v,
        out,
        starts,
        lens,
        most_q,
        most_k,
        table,
        scale,
        causal,
        left,
        cap,
        sinks,
    ):  # type: ignore[no-untyped-def]
        if q_v is not None:
            q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
        lse = torch.empty(q.shape[1], q.shape[0])
        options = AttentionOptions(
            causal=causal,
            sliding_window=None if left < 0 else left + 1,
            logits_soft_cap=cap or None,
            sinks=None if sinks is None else sinks.float(),
        )
        found = paged_attention(
            q, k, v, table, starts, lens, most_q, most_k, scale, lse=lse, options=options,
            out=q.new_empty(*q.shape[:2], v.shape[-1]),
        )  # fmt: skip
        if out is not None:
            out.copy_(found)
        return [found, lse]

    def plan(*given: Any) -> torch.Tensor:
        plans.append(given)
        return torch.zeros(1)

    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", plan, "CompositeExplicitAutograd")
    yield SimpleNamespace(library=library, plans=plans)


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("prefill-4x3k-sinks-swa256-d64", [(2, 32, 32, False)]),
        ("prefill-1x6k-cap30-d256", [(1, 32, 32, True)]),
        ("prefill-1x8k-d192-v128", [(1, 48, 32, False)]),
        ("mla-verify-q2-128h-64x4k", [(2, 16, 32, False)]),
        ("cascade-128x4k+256", [(1, 32, 32, False), (2, 32, 32, False)]),
    ],
)
def test_flash_attention_3_gets_the_options_of_a_workload(
    operators_of_flash_attention_3: Any, name: str, planned: list[Any]
) -> None:
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops.pagetwin_option_fa3
    inputs = draw_inputs(small(name), 0, "cpu")
    prepared = peer.prepare(inputs)
    found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
    assert found.ok, found.message
    assert operators_of_flash_attention_3.plans == planned


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("prefill-2x4k-alibi", "ALiBi"), ("invariant-decode-64x4k", "batch invariance")],
)
def test_flash_attention_3_declines_what_it_lacks(name: str, lacking: str) -> None:
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops
    with pytest.raises(Declined, match=f"does not support {lacking} here"):
        peer.prepare(draw_inputs(small(name), 0, "cpu"))


def test_flashmla_reuses_the_schedule_of_its_first_call() -> None:
    from pagetwin.reference.attention.paged import paged_attention

    library = torch.library.Library("pagetwin_fake_flashmla", "DEF")
    library.define(
        "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor"
        " block_table, float softmax_scale, bool is_causal, Tensor? metadata, Tensor?"
        " num_splits, Tensor? out) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    plans: list[Any] = []

    def decode(q, cache, size, lens, table, scale, causal, metadata, splits, out):  # type: ignore[no-untyped-def]
        plans.append((metadata, splits))
        reqs, new = q.shape[:2]
        rows = q.flatten(0, 1)
        starts = torch.arange(reqs + 1, dtype=torch.int32) * new
        found = paged_attention(
            rows, cache, cache[..., :size], table, starts, lens, new, int(lens.max()), scale,
            out=rows.new_empty(*rows.shape[:2], size), options=AttentionOptions(causal=causal),
        )  # fmt: skip
        return (
            found.view(reqs, new, -1, size),
            torch.zeros(1),
            torch.ones(1),
            torch.ones(2),
        )

    library.impl("dense_decode_fwd", decode, "CPU")
    peer = FlashMLA("cpu")
    peer._decode = torch.ops.pagetwin_fake_flashmla.dense_decode_fwd
    inputs = draw_inputs(small("mla-verify-q2-128h-64x4k"), 0, "cpu")
    prepared = peer.prepare(inputs)
    out = prepared.rows(prepared.call())
    found = find_expected(inputs).check(out, torch.bfloat16)
    assert found.ok, found.message
    assert plans[0] == (None, None)
    assert [each.shape for each in plans[1]] == [(1,), (2,)]
    with pytest.raises(Declined, match="latent decodes only"):
        peer.prepare(draw_inputs(small("decode-16x512"), 0, "cpu"))


def test_an_operator_that_wants_what_nobody_knows_is_declined() -> None:
    library = torch.library.Library("pagetwin_new_fa3", "DEF")
    library.define("fwd(Tensor q, int unheard_of) -> Tensor")
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops.pagetwin_new_fa3
    inputs = draw_inputs(small("encoder-32x1500"), 0, "cpu")
    with pytest.raises(Declined, match="fwd requires unheard_of"):
        peer.prepare(inputs)


def test_vllms_kernel_gets_the_arguments_that_it_takes(monkeypatch: Any) -> None:
    from pagetwin.reference.attention.paged import paged_attention
    from pagetwin.tools.bench.libraries import vllm_triton

    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, window_size,
        block_table, causal, k_descale,
    ):  # type: ignore[no-untyped-def] # fmt: skip
        window = None if window_size[0] < 0 else window_size[0] + 1
        paged_attention(
            q, k, v, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k,
            out=out, options=AttentionOptions(causal=causal, sliding_window=window),
        )  # fmt: skip

    module = SimpleNamespace(unified_attention=unified_attention)
    monkeypatch.setitem(sys.modules, vllm_triton.ATTEND, module)
    for name in ("decode-64x4k-swa", "mixed-128x4k+2k"):
        inputs = draw_inputs(small(name), 0, "cpu")
        prepared = vllm_triton.VLLMTriton("cpu").prepare(inputs)
        found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
        assert found.ok, found.message


def test_flashinfer_is_told_where_blocks_begin_and_how_full_the_last_one_is() -> None:
    from pagetwin.tools.bench.libraries.flashinfer import _flat_blocks

    workload = Workload("", "decode", "", (1, 1, 1), (16, 17, 40), 2, 1, 32)
    inputs = draw_inputs(workload, 0, "cpu")
    starts, blocks, last = _flat_blocks(inputs)
    assert starts.tolist() == [0, 1, 3, 6]
    assert last.tolist() == [16, 1, 8]
    assert blocks.tolist() == [
        *inputs.block_table[0, :1],
        *inputs.block_table[1, :2],
        *inputs.block_table[2, :3],
    ]


# refusals


def test_an_unknown_workload_is_answered_with_those_that_are_near() -> None:
    result = run("--smoke", "--device", "cpu", "decode-64x4")
    assert result.exit_code == USER_ERROR
    words = " ".join(result.output.split())
    assert "'decode-64x4': did you mean decode-64x4k" in words
    with pytest.raises(ValueError, match="expected some of decode-64x4k, decode-256"):
        choose_settings(["quantum"], device="cpu", smoke=True)


def test_a_pattern_names_several_workloads_in_their_order() -> None:
    chosen = settings_of("write-8k", "decode-64x4k*")
    assert [each.name for each in chosen.workloads] == [
        "decode-64x4k",
        "decode-64x4k-mha",
        "decode-64x4k-fp8",
        "decode-64x4k-swa",
        "write-8k",
    ]


def test_without_a_gpu_full_workloads_are_refused_and_smoke_is_named() -> None:
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
        (("--suite", "both"), "suite = 'both': expected standard, extended, all"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    words: tuple[str, ...], said: str
) -> None:
    device = () if "--device" in words else ("--device", "cpu")
    result = run("--smoke", *device, *words)
    assert result.exit_code == USER_ERROR
    assert said in result.output
