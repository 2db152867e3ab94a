"""Workloads of the benchmark: lengths, bytes, operations, floors and published figures."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bench_runs import CEILINGS, NAMES, small
from pagetwin.tools.bench import load_workloads
from pagetwin.tools.bench.libraries import all_libraries
from pagetwin.tools.bench.workloads import Workload, best_published, published_figures

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)


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
    sides = Workload(
        "", "encoder", "", (5,), (5,), 1, 1, 8, causal=False, sliding_window=2
    )
    assert sides.flops == 4 * 8 * (2 + 3 + 3 + 3 + 2)
    wide = replace(sides, sliding_window=4)
    assert wide.flops == 4 * 8 * (4 + 5 + 5 + 5 + 4)
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
    standard, extended = (load_workloads(suite) for suite in ("standard", "extended"))
    assert len(extended) == 34 and not standard.keys() & extended.keys()
    assert list(load_workloads("all")) == [*standard, *extended]
    libraries = {library.name for library in all_libraries("cpu", suite="extended")}
    for workload in extended.values():
        assert workload.aim is not None and 0.5 <= workload.aim <= 1.1, workload.name
        assert set(workload.baselines) <= libraries, workload.name
        assert workload.about and workload.source, workload.name
    assert all(workload.aim is None for workload in standard.values())


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
