"""The suite of sparse attention: workloads, inputs, costs, accuracy checks, and a smoke run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import CEILINGS, run
from pagetwin.contract.operations import load_implementation
from pagetwin.tools.bench import Benchmark, choose_settings, load_workloads
from pagetwin.tools.bench.libraries import all_libraries
from pagetwin.tools.bench.sparse.accuracy import find_any_expected
from pagetwin.tools.bench.sparse.costs import SPARSE_KINDS, count_selected
from pagetwin.tools.bench.sparse.inputs import (
    IndexInputs,
    SelectInputs,
    SparseInputs,
    draw_any_inputs,
)
from pagetwin.tools.bench.workloads import Workload
from pagetwin.tools.bench_names import SPARSE

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)
REFERENCE: Any = load_implementation("reference")
PROMPT = "sparse-mla-16h-prompt-2k"
KINDS = ("sparse-mla-16h-16x32k", "sparse-gqa-16x32k", PROMPT)


def tiny(name: str) -> Workload:
    return load_workloads("sparse")[name].tiny()


def test_the_suite_has_latents_heads_scores_and_selections_of_each_size() -> None:
    workloads = load_workloads("sparse")
    others = load_workloads("all").keys() | load_workloads("formats").keys()
    assert len(workloads) == 31 and not workloads.keys() & others
    assert {workload.kind for workload in workloads.values()} == set(SPARSE_KINDS)
    latents = [w for w in workloads.values() if w.shares_values]
    assert {w.query_heads for w in latents} == {8, 16, 64, 128}
    assert {(w.head_size, w.value_size, w.kv_heads) for w in latents} == {(576, 512, 1)}
    assert {w.scale for w in latents} == {(128 + 64) ** -0.5}
    assert {w.block_size for w in workloads.values()} == {64}
    for kind in SPARSE_KINDS:
        own = [w for w in workloads.values() if w.kind == kind]
        one_each = [w for w in own if set(w.query_lens) == {1}]
        assert {len(w.kv_lens) for w in one_each} == {1, 16, 128}
        assert {max(w.kv_lens) for w in one_each} == {4096, 32768, 131072}
        assert {w.selected for w in own} == ({0} if kind == "score" else {2048})
    prompts = [w for w in latents if w.query_lens == (2048,)]
    assert [w.kv_lens for w in prompts] == [(2048,), (2048,)]
    scored = workloads["score-1x4k"]
    assert (scored.query_heads, scored.head_size) == (64, 128)


def test_every_library_of_the_suite_has_a_name_that_the_command_takes() -> None:
    assert [library.name for library in all_libraries("cpu", suite="sparse")] == list(
        SPARSE
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_token_selects_distinct_visible_keys(name: str) -> None:
    workload = tiny(name)
    one, again, other = (draw_any_inputs(workload, seed, "cpu") for seed in (1, 1, 2))
    assert isinstance(one, SparseInputs) and isinstance(again, SparseInputs)
    assert isinstance(other, SparseInputs)
    assert torch.equal(one.slots, again.slots)
    assert not torch.equal(one.slots, other.slots)
    size, token = workload.block_size, 0
    for req, new in enumerate(workload.query_lens):
        table = one.block_table[req].tolist()
        for seen in range(workload.kv_lens[req] - new + 1, workload.kv_lens[req] + 1):
            own = [
                table[position // size] * size + position % size
                for position in range(seen)
            ]
            row = one.slots[token].tolist()
            count = min(seen, workload.selected)
            assert len(set(row[:count])) == count and set(row[:count]) <= set(own)
            assert set(row[count:]) <= {-1}
            assert count < 3 or row[:count] != sorted(row[:count])
            token += 1
    assert token == workload.tokens


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_one_are_the_same_attention(name: str) -> None:
    """What is expected comes from paged attention, and is what sparse attention means."""
    inputs = draw_any_inputs(tiny(name), 0, "cpu")
    assert isinstance(inputs, SparseInputs)
    expected = find_any_expected(inputs)
    found = REFERENCE.sparse_attention(
        inputs.query.float(), inputs.key_cache.float(), inputs.value_cache.float(),
        inputs.slots, inputs.workload.scale,
    )  # fmt: skip
    assert expected.check(found.to(torch.bfloat16), torch.bfloat16).ok
    # without one key of each row
    slots = inputs.slots.clone()
    slots[:, 0] = -1
    fewer = REFERENCE.sparse_attention(
        inputs.query.float(), inputs.key_cache.float(), inputs.value_cache.float(),
        slots, inputs.workload.scale,
    )  # fmt: skip
    assert not expected.check(fewer.to(torch.bfloat16), torch.bfloat16).ok


def test_scores_are_compared_with_sums_in_float64() -> None:
    inputs = draw_any_inputs(tiny("score-16x32k"), 0, "cpu")
    assert isinstance(inputs, IndexInputs)
    expected = find_any_expected(inputs)
    found = REFERENCE.index_scores(
        inputs.query, inputs.weights, inputs.kv_cache, inputs.block_table,
        inputs.query_start_loc, inputs.seq_lens, inputs.max_seq_len,
    )  # fmt: skip
    verdict = expected.check(found[:, None], torch.float32)
    assert verdict.ok and verdict.share <= 1, verdict.message
    found[-1, -1] *= 1.001
    assert not expected.check(found[:, None], torch.float32).ok


def test_a_selection_is_right_in_any_order_and_wrong_with_any_other_key() -> None:
    workload = tiny("select-16x32k")
    inputs = draw_any_inputs(workload, 0, "cpu")
    assert isinstance(inputs, SelectInputs)
    expected = find_any_expected(inputs)
    right = REFERENCE.select_keys(inputs.scores, workload.selected)

    def verdict(found: torch.Tensor) -> str:
        finding = expected.check(found, torch.float32)
        assert finding.ok == (not finding.message)
        return finding.message

    assert not verdict(right)
    assert not verdict(right.flip(1).long())
    for wrong, said in (
        (right[:, :-1], "its output has shape"),
        (right.index_fill(1, torch.tensor([0]), 48), "outside or twice"),
        (right.index_fill(1, torch.tensor([0]), -2), "outside or twice"),
        (right[:, [1, *range(1, workload.selected)]], "outside or twice"),
        (right.index_fill(1, torch.tensor([3]), -1), "does not have the largest"),
    ):
        assert said in verdict(wrong)
    missing = next(key for key in range(48) if key not in right[1].tolist())
    other = right.clone()
    other[1, 0] = missing
    assert verdict(other) == "row 1 does not have the largest scores"


def test_a_token_of_few_keys_selects_all_and_then_none() -> None:
    workload = replace(tiny("select-1x4k"), query_lens=(2,), kv_lens=(5,), selected=5)
    inputs = draw_any_inputs(workload, 0, "cpu")
    assert isinstance(inputs, SelectInputs)
    assert inputs.scores.isinf().tolist() == [[False] * 4 + [True], [False] * 5]
    expected = find_any_expected(inputs)
    right = torch.tensor([[0, 1, 2, 3, -1], [0, 1, 2, 3, 4]])
    assert expected.check(right, torch.float32).ok
    right[0, 4] = 4
    assert not expected.check(right, torch.float32).ok


def test_bytes_and_operations_of_sparse_kinds_are_those_counted_by_hand() -> None:
    latent = Workload(
        "", "sparse", "", (1,), (10,), 2, 1, 3, value_head_size=2, selected=4
    )
    assert latent.shares_values
    assert latent.bytes == 4 * 3 * 2 + 4 * 4 + 2 * (3 + 2) * 2
    assert latent.flops == 2 * (3 + 2) * 2 * 4
    heads = Workload("", "sparse", "", (2,), (3,), 4, 2, 8, selected=2)
    assert count_selected(heads) == [2, 2]
    assert count_selected(replace(heads, selected=9)) == [2, 3]
    assert heads.bytes == 2 * 2 * 16 * 2 + 2 * 2 * 4 + 2 * 4 * 16 * 2
    assert heads.flops == 2 * 16 * 4 * (2 + 2)
    score = Workload(
        "", "score", "", (1, 1), (10, 6), 4, 1, 8, kv_dtype=torch.float8_e4m3fn
    )
    assert score.bytes == 16 * (8 + 4) + 2 * 4 * (8 + 4) + 16 * 4
    assert score.flops == 2 * 8 * 4 * 16
    select = Workload("", "select", "", (1, 2), (10, 6), 1, 1, 1, selected=3)
    assert (select.bytes, select.flops) == ((10 + 5 + 6) * 4 + 3 * 3 * 4, 0)
    us, what = CEILINGS.floor(load_workloads("sparse")["score-128x32k"])
    assert what == "reads" and us > 100


def test_a_smoke_run_of_a_workload_of_each_kind_is_right() -> None:
    """By the reference under our name, so that no kernel is interpreted."""

    class AsOurs(type(all_libraries("cpu", suite="sparse")[0])):  # type: ignore[misc]
        def watch(self) -> Any:
            from contextlib import nullcontext

            return nullcontext([])

    names = ("sparse-gqa-1x32k", "select-1x4k")
    settings = choose_settings(names, device="cpu", smoke=True, suite="sparse")
    libraries = all_libraries("cpu", suite="sparse")
    wanted = [AsOurs("cpu"), *(lib for lib in libraries if lib.name[:5] == "torch")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pagetwin.tools.bench.libraries.ours.load_implementation",
            lambda _: REFERENCE,
        )
        record = Benchmark(settings, wanted).run()
    attend, select = (workload["results"] for workload in record["workloads"])
    assert attend["ours"]["status"] == select["ours"]["status"] == "timed"
    assert attend["torch-flash"]["status"] == "timed"
    assert not attend["torch-flash"]["same_work"]
    assert "blocks of one" in attend["torch-flash"]["note"]
    assert select["torch-topk"]["status"] == "timed"
    assert attend["torch-topk"]["reason"] == "it computes no attention"
    assert select["torch-flash"]["reason"] == "it does not select keys"


@pytest.mark.long
def test_a_smoke_run_does_every_sparse_workload_right(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        result = run(
            *("--smoke", "--device", "cpu", "--suite", "sparse", "--json", file),
            *("--implementations", "torch,vllm", "--repeats", 1),
        )
    assert result.exit_code == 0, result.output
    for workload in json.loads(file.read_text())["workloads"]:
        ours = workload["results"]["ours"]
        assert ours["status"] == "timed" and ours["share_of_budget"] <= 1, workload
        kernels = ours.get("kernels", [])
        assert bool(kernels) == (workload["kind"] == "sparse")
        assert all(kernel.startswith("portable ") for kernel in kernels)
    assert "vllm-indexer missing: needs a CUDA device" in result.output


def test_the_suite_takes_the_names_of_its_own_libraries() -> None:
    result = run(
        *("--smoke", "--device", "cpu", "--suite", "sparse"),
        *("--implementations", "xformers"),
    )
    assert "implementations = 'xformers'" in result.output
    assert "vllm-indexer" in result.output
