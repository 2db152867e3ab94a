"""FlashInfer-Bench: definitions and references, solutions as candidates, workloads, traces."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest
import torch
from pagetwin.conformance import Status
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.base.support import Support
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.preflight import check_can_run
from pagetwin.conformance.cases.latent_batches import LatentPlan
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.flashinfer_bench.definitions import (
    Definition,
    find_definition,
)
from pagetwin.conformance.flashinfer_bench.export import (
    reference_solution,
    solutions_of,
)
from pagetwin.conformance.flashinfer_bench.families import EXPORTED, FAMILIES
from pagetwin.conformance.flashinfer_bench.inputs.calls import PAST, map_heads
from pagetwin.conformance.flashinfer_bench.inputs.indexer import (
    IndexedRow,
    draw_rows,
    index_inputs,
    positions_of,
)
from pagetwin.conformance.flashinfer_bench.inputs.selections import place_latents
from pagetwin.conformance.flashinfer_bench.measuring import (
    load_reference,
    measure,
    time_calls,
)
from pagetwin.conformance.flashinfer_bench.measuring_selections import (
    draw_seed,
    draw_weights,
    expect_selected,
)
from pagetwin.conformance.flashinfer_bench.timed_results import doubled
from pagetwin.conformance.flashinfer_bench.workloads import workloads_of
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.trial import find_law, make_setting, try_law
from pagetwin.tools.cli import USER_ERROR, app
from pagetwin.tools.solution_commands import write_traces
from typer.testing import CliRunner

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("guarded_calls")]

ATTENDS = "every new token attends to its sequence up to itself"
WRITES = "each token is written to its slot and nothing else changes"
MERGES = "two partial results combine by their weight"
SCORES = "keys without a score are never selected"
SELECTS = "a query attends to the slots that its row names"
LATENTS = "a decode over latents is full multi head attention"
CPU = torch.device("cpu")
QUERIES = ("q", "q_nope", "q_pe")
KEYS_AND_VALUES = (
    "k",
    "v",
    "k_cache",
    "v_cache",
    "ckv_cache",
    "kpe_cache",
    "v_a",
    "v_b",
)
SMALL = (
    "gqa_paged_decode_h4_kv2_d16_ps1",
    "gqa_paged_decode_h4_kv2_d16_ps16",
    "gqa_paged_prefill_causal_h6_kv2_d8_ps3",
    "gqa_ragged_prefill_causal_h4_kv4_d8",
    "mla_paged_decode_h3_ckv32_kpe24_ps1",
    "mla_paged_prefill_causal_h2_ckv24_kpe24_ps16",
    "merge_state_h3_d16",
    "gqa_ragged_decode_h4_kv2_d16",
    "dsa_sparse_attention_h3_ckv96_kpe24_topk512_ps16",
    "dsa_topk_indexer_fp8_h8_d16_topk512_ps16",
    "paged_kv_append_kv2_d16_ps8",
)
"""A definition of each family, and of page size 1."""
DECODE = SMALL[1]
KERNEL = Path(__file__).parents[2] / "docs" / "solutions" / "paged_decode.py"

Pack = Callable[..., str]


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Return a function that writes a solution, the reference of a definition if not told else."""

    def write(name: str = DECODE, source: str | None = None, **spec: Any) -> str:
        solution = reference_solution(find_definition(name))
        if source is not None:
            solution["sources"][0]["content"] = source
        solution["spec"] |= spec
        path = tmp_path / "solution.json"
        path.write_text(json.dumps(solution))
        return str(path)

    return write


def law_of(definition: Definition) -> str:
    if definition.family.name == "merge_state":
        return MERGES
    if definition.family.name == "paged_kv_append":
        return WRITES
    if definition.family.name == "dsa_topk_indexer_fp8":
        return SCORES
    if definition.family.name == "dsa_sparse_attention":
        return SELECTS
    return ATTENDS if "head_dim" in definition.constants else LATENTS


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_of_a_definition_holds_its_law(name: str, pack: Pack) -> None:
    candidate = load_candidate(pack(name))
    law = find_law(law_of(find_definition(name)))
    examples = 24 if candidate.operations.keys() == {"merge_attn_states"} else 8
    result = try_law(law, make_setting(candidate, "cpu"), 0, examples)
    assert result.status == Status.HELD, result
    assert result.cases >= result.skipped + 5


@pytest.mark.parametrize("name", SMALL[:-2])
def test_the_reference_of_a_definition_computes_in_float64(name: str) -> None:
    """A timed result is compared with it as with the exact one."""
    definition = find_definition(name)
    inputs = doubled(workloads_of(definition)[1].inputs(CPU))
    changed, factor = dict(inputs), math.pi
    for argument in inputs:
        if argument in QUERIES:
            changed[argument] = inputs[argument] / factor
        elif argument in KEYS_AND_VALUES:
            changed[argument] = inputs[argument] * factor
    run = load_reference(definition)
    output, (found, _) = run(*inputs.values())[0], run(*changed.values())
    torch.testing.assert_close(found, output * factor, rtol=1e-12, atol=1e-12)


def test_names_of_definitions_are_read_and_written_alike() -> None:
    for name in (*EXPORTED, *SMALL):
        definition = find_definition(name)
        assert definition.name == name
        found = definition.to_json()
        assert [*found["axes"]] == definition.axes
        shapes = [*found["inputs"].values(), *found["outputs"].values()]
        assert {axis for spec in shapes for axis in spec["shape"] or ()} == set(
            found["axes"]
        )
    found = {find_definition(name).family.name for name in SMALL}
    assert found == {family.name for family in FAMILIES}


@pytest.mark.parametrize(("heads", "most"), [(1, 4), (3, 4), (4, 4), (2, 8)])
def test_every_head_of_a_definition_gets_a_head_of_the_case(
    heads: int, most: int
) -> None:
    found = map_heads(range(5, 5 + heads), 3, most, seed=1)
    assert len(found.kv_sources) == most and set(found.kv_sources) == set(
        range(5, 5 + heads)
    )
    rows = [found.query_sources[place] for place in found.query_places]
    assert rows == list(range(15, 15 + 3 * heads))


def test_a_latent_plan_is_fitted_to_the_declared_support() -> None:
    plan = LatentPlan(
        (3, 0), (20, 5), cache_dtype=torch.float8_e5m2, sliding_window=7, scale=0.3,
        spare_max=5,
    )  # fmt: skip
    support = Support(
        dtypes=["bfloat16"], cache_dtypes=["bfloat16"], block_sizes=[64],
        query_lens=[1], options=["lse"],
    )  # fmt: skip
    fitted = plan.within(support)
    assert (fitted.query_lens, fitted.key_lens) == ((1, 1), (20, 5))
    assert (fitted.dtype, fitted.block_size) == (torch.bfloat16, 64)
    assert fitted.cache_dtype is fitted.sliding_window is fitted.scale is None
    assert fitted.spare_max == 0
    assert plan.within(Support()) == plan


# solutions

MANY_HEADS = "gqa_paged_decode_h32_kv8_d16_ps16"
BROKEN = {
    "a natural logarithm": (DECODE, "row_lse.T / math.log(2)", "row_lse.T"),
    "whole pages": (DECODE, "+ int(kv_last_page_len[req])", "+ k_cache.shape[1]"),
    "heads in another order, of which cases have fewer": (
        MANY_HEADS,
        "repeat_interleave(group, 1)",
        "repeat(1, group, 1)",
    ),
    "a merge by natural logarithms": (
        SMALL[6],
        "double() * math.log(2)",
        "double()",
    ),
    "an append that loses other slots": (
        SMALL[-1],
        "cache.clone()",
        "torch.zeros_like(cache)",
    ),
    "an append for the wrong request": (
        SMALL[-1],
        "[batch_indices.long()]",
        "[batch_indices.long() * 0]",
    ),
    "an append to one page": (
        SMALL[-1],
        "first + positions.long() // page_size",
        "first",
    ),
    "an append that swaps heads": (SMALL[-1], "= new\n", "= new.flip(1)\n"),
}
EXAMPLES = {ATTENDS: 12, MERGES: 24, WRITES: 60}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_solution_breaks_the_law(fault: str, pack: Pack) -> None:
    name, right, wrong = BROKEN[fault]
    definition = find_definition(name)
    assert right in definition.reference
    candidate = load_candidate(pack(name, definition.reference.replace(right, wrong)))
    law = law_of(definition)
    setting = make_setting(candidate, "cpu")
    result = try_law(find_law(law), setting, 0, EXAMPLES[law])
    assert result.status == Status.BROKEN, result


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel would be compiled")
def test_a_triton_solution_is_interpreted_in_float32_and_fills_its_outputs(
    pack: Pack,
) -> None:
    spec = {"language": "triton", "destination_passing_style": True}
    candidate = load_candidate(pack(DECODE, KERNEL.read_text(), **spec))
    assert candidate.support.dtypes == ["float32"]
    result = try_law(find_law(ATTENDS), make_setting(candidate, "cpu"), 0, 4)
    assert result.status == Status.HELD, result


def test_an_output_that_is_not_filled_breaks_the_law(pack: Pack) -> None:
    arguments = ", ".join([*find_definition(DECODE).inputs, "output", "lse"])
    source = f"def run({arguments}):\n    lse.zero_()\n    output[:, 1:] = 0\n"
    file = pack(source=source, destination_passing_style=True)
    setting = make_setting(load_candidate(file), "cpu")
    result = try_law(find_law(ATTENDS), setting, 0, 4)
    assert (result.status, result.found) == (Status.BROKEN, "nan")


def test_a_source_may_import_its_siblings(pack: Pack, tmp_path: Path) -> None:
    file = pack(source="from .parts.attention import run\n")
    solution = json.loads(Path(file).read_text())
    own = {"path": "parts/attention.py", "content": find_definition(DECODE).reference}
    solution["sources"].append(own)
    Path(file).write_text(json.dumps(solution))
    candidate = load_candidate(file)
    run = unwrap(candidate.operations["paged_attention"]).__self__.function
    assert run.__module__.endswith(".parts.attention")
    assert not [path for path in tmp_path.iterdir() if path.name != "solution.json"]


REFERENCE = find_definition(DECODE).reference


def test_an_error_of_an_import_names_the_line_of_the_source(pack: Pack) -> None:
    file = pack(source=f"x = 1\nprint(x / 0)\n{REFERENCE}")
    with pytest.raises(ImportError) as raised:
        check_can_run(file, "cpu")
    assert str(raised.value) == (
        f"{file} cannot be imported: ZeroDivisionError: division by zero (main.py, line 2)"
    )


FILES = {
    "not JSON": ("{", "solution.json is not a JSON file: "),
    "not an object": ("[1]", "contains list: expected an object"),
    "no field": ("{}", "spec is missing: expected an object"),
    "an unknown definition": (
        json.dumps(
            {
                "name": "gemm",
                "definition": "gemm_n4096_k4096",
                "spec": {"entry_point": "main.py::run"},
                "sources": [{"path": "main.py", "content": "def run(): pass"}],
            }
        ),
        "definition = 'gemm_n4096_k4096' is not known: expected gqa_paged_decode_h",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_is_not_a_solution_is_rejected_before_torch_is_imported(
    what: str, tmp_path: Path
) -> None:
    text, sentence = FILES[what]
    file = tmp_path / "solution.json"
    file.write_text(text)
    script = (
        "import sys\nfrom pagetwin.tools.cli import app\n"
        f"try:\n    app(['check', '--solution', {str(file)!r}])\n"
        "except SystemExit:\n    assert 'torch' not in sys.modules\n    raise\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == USER_ERROR, done.stderr
    assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "none given: expected a MODULE or --solution FILE"),
        (["reference", "--solution", "a.json"], "both given"),
        (["reference", "--trace", "t.jsonl"], "without --solution"),
        (["--solution", "nowhere.json"], "the file does not exist"),
        (["--definition", "gemm_n1"], "definition = 'gemm_n1' is not known"),
    ],
)
def test_what_cannot_be_checked_or_exported_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    is_export = words[:1] == ["--definition"]
    command = ["export", str(tmp_path)] if is_export else ["check"]
    result = CliRunner().invoke(app, [*command, *words])
    assert result.exit_code == USER_ERROR
    assert sentence in result.output and len(result.output.splitlines()) == 1


# workloads and traces

FAULTS = """
import os

def run_with_faults(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    found = run(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale)
    output, lse = found
    requests, pages = len(q), len(kv_indices)
    if requests == 1:
        return output + 1, lse
    if requests == 64:
        return output[:, :1], lse
    if requests == 6:
        return output.float(), lse
    if pages > 40:
        os.abort()
    if requests == 2:
        raise RuntimeError("two requests")
    return output, lse
"""


def test_each_workload_is_judged_though_a_kernel_ends_the_process(
    pack: Pack, tmp_path: Path
) -> None:
    file = pack(source=REFERENCE + FAULTS, entry_point="main.py::run_with_faults")
    report = Report(file, "cpu", (Result(ATTENDS, "attention", Status.HELD),))
    write_traces(tmp_path / "trace.jsonl", report, seconds_of_a_case=60.0)
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    traces = [json.loads(text_line) for text_line in lines]
    workloads = workloads_of(find_definition(DECODE))
    assert [trace["workload"] for trace in traces] == [
        workload.to_json() for workload in workloads
    ]
    found = {
        workload.title: trace["evaluation"]
        for workload, trace in zip(workloads, traces, strict=True)
    }
    assert {title: evaluation["status"] for title, evaluation in found.items()} == {
        "one key": "INCORRECT_NUMERICAL",
        "page edges, needle last": "PASSED",
        "tile edges, needle there": "INCORRECT_DTYPE",
        "shared pages": "PASSED",
        "a page twice": "RUNTIME_ERROR",
        "a long request": "RUNTIME_ERROR",
        "many requests": "INCORRECT_SHAPE",
    }
    wrong, right = found["one key"], found["shared pages"]
    assert wrong["correctness"]["max_absolute_error"] == pytest.approx(1, abs=0.01)
    assert wrong["performance"] is None
    assert right["correctness"]["max_absolute_error"] < 0.02
    assert right["performance"]["latency_ms"] > 0
    assert found["a long request"]["correctness"] is None
    assert "ended with code -6" in found["a long request"]["log"]
    assert right["log"] == "laws of pagetwin: 1 held"


@pytest.mark.parametrize("name", [SMALL[1], SMALL[3], SMALL[4], *SMALL[6:]])
def test_an_exported_definition_can_be_read_with_its_tensors(
    name: str, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    definition = find_definition(name)
    words = ["export", str(tmp_path), "--definition", name]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    where = definition.family.op_type
    found = json.loads((tmp_path / f"definitions/{where}/{name}.json").read_text())
    assert found == definition.to_json()
    lines = (tmp_path / f"workloads/{where}/{name}.jsonl").read_text().splitlines()
    assert f"{name}: {len(lines)} workloads" in result.output
    assert len(
        {json.loads(text_line)["workload"]["uuid"] for text_line in lines}
    ) == len(lines)
    poisoned = 0
    for line in lines:
        workload = json.loads(line)["workload"]
        tensors = safetensors.load_file(
            tmp_path / next(iter(workload["inputs"].values()))["path"]
        )
        sizes = workload["axes"] | definition.constants
        given = []
        for input_name, shape in definition.inputs.items():
            if shape is None:
                given.append(workload["inputs"][input_name]["value"])
                continue
            assert list(tensors[input_name].shape) == [sizes[axis] for axis in shape]
            assert (
                str(tensors[input_name].dtype)
                == f"torch.{found['inputs'][input_name]['dtype']}"
            )
            poisoned += is_poisoned(tensors[input_name])
            given.append(tensors[input_name])
        # FlashInfer-Bench counts infinite and NaN outputs as errors
        assert all(
            output.isfinite().all() for output in load_reference(definition)(*given)
        )
    holds_poison = definition.family.is_paged and where != "cache_append"
    assert bool(poisoned) == holds_poison or name == SMALL[6]


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has NaN; of a cache of bytes, whether it has that of FP8."""
    if tensor.dtype == torch.int8:
        return bool((tensor == 0x7F).any())
    return tensor.is_floating_point() and bool(tensor.float().isnan().any())


def test_page_ids_after_the_last_one_are_outside_of_the_cache() -> None:
    inputs = workloads_of(find_definition(DECODE))[1].inputs(CPU)
    ids = inputs["kv_indices"]
    past = torch.empty(0, dtype=torch.int32).set_(ids.untyped_storage(), len(ids), (8,))
    assert past.tolist() == [PAST] * 8


SPARSE = "dsa_sparse_attention_h3_ckv96_kpe24_topk512_ps16"
INDEXER = "dsa_topk_indexer_fp8_h8_d16_topk512_ps16"


@pytest.mark.parametrize(
    ("name", "law", "cases"), [(SPARSE, SELECTS, 12), (INDEXER, SCORES, 5)]
)
def test_our_operation_is_exported_as_a_solution(
    tmp_path: Path, name: str, law: str, cases: int
) -> None:
    """In the interpreter, whose tensors are float32."""
    definition = find_definition(name)
    reference, own = solutions_of(definition)
    assert reference == reference_solution(definition)
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        candidate = load_candidate(str(path))
        result = try_law(find_law(law), make_setting(candidate, "cpu"), 0, 12)
    assert result.status == Status.HELD, result
    assert result.cases == cases and not result.skipped
    assert len(solutions_of(find_definition(DECODE))) == 1


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        # the last slot of a row; a slot once; the scale; the second page
        ("row[row >= 0][:-1]", "row[row >= 0]"),
        ("row[row >= 0].unique()", "row[row >= 0]"),
        ("scores *= 1.0", "scores *= sm_scale"),
        ("row[row >= 0] % ckv_cache.shape[1]", "row[row >= 0]"),
        ("row.clamp(min=0)", "row[row >= 0]"),
    ],
)
def test_a_broken_selection_breaks_the_law(wrong: str, right: str, pack: Pack) -> None:
    source = find_definition(SPARSE).reference
    assert right in source
    candidate = load_candidate(pack(SPARSE, source.replace(right, wrong)))
    result = try_law(find_law(SELECTS), make_setting(candidate, "cpu"), 0, 12)
    assert result.status in (Status.BROKEN, Status.CRASHED), wrong


@pytest.mark.parametrize("topk", [0, 511, 8193])
def test_a_definition_has_room_for_the_rows_of_the_laws(topk: int) -> None:
    with pytest.raises(ValueError, match="expected topk from 512 to 8192"):
        find_definition(f"dsa_sparse_attention_h16_ckv512_kpe64_topk{topk}_ps64")


def test_selections_of_a_workload_have_a_slot_in_every_row() -> None:
    for workload in workloads_of(find_definition(SPARSE)):
        inputs = workload.inputs(CPU)
        slots = inputs["sparse_indices"]
        assert slots.dtype == torch.int32 and slots.shape[1] == 512
        assert bool((slots >= 0).any(1).all())
        latents = inputs["ckv_cache"].flatten(0, 1)
        assert bool(latents[slots[slots >= 0].long()].isfinite().all())
    titles = {workload.title for workload in workloads_of(find_definition(SPARSE))}
    assert "as many slots as there may be" in titles


def test_keys_and_values_that_are_not_latents_become_latents() -> None:
    definition = find_definition(SPARSE)
    query, keys, values = (
        torch.randn(2, 3, 20),
        torch.randn(3, 7, 20),
        torch.randn(3, 7, 9),
    )
    found = place_latents(definition, query, (keys, values), seed=0)
    assert found.ckv_cache.shape == (2, 16, 96) and found.q_pe.count_nonzero() == 0
    scores = torch.einsum("thl,pkl->thpk", found.q_nope, found.ckv_cache)
    right = query.flatten(0, 1) @ keys.flatten(0, 1).T
    torch.testing.assert_close(scores.view(6, 32)[:, :21], right)
    torch.testing.assert_close(
        found.ckv_cache.flatten(0, 1)[:21, found.value_columns], values.flatten(0, 1)
    )
    assert bool(found.ckv_cache.flatten(0, 1)[21:, found.value_columns].isnan().all())
    with pytest.raises(ValueError, match="expected at most 96 together"):
        place_latents(
            definition, torch.randn(2, 3, 60), (torch.randn(1, 2, 60),) * 2, 0
        )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (
            "q_index_fp8[req].double() @ key.T",
            "(q_index_fp8[req].double() @ key.T).relu()",
        ),
        ("weights[req].double().abs() @", "weights[req].double() @"),
        ("scale.double()[:, None] ** 0", "scale.double()[:, None]"),
        ("argsort(stable=True)", "argsort(descending=True, stable=True)"),
        ("position // size * size", "block_table[req].long()[position // size] * size"),
        ("[:keys - 1]\n    key", "[:keys]\n    key"),
        ("[:topk - 1]", "[:topk]"),
    ],
)
def test_a_broken_indexer_breaks_the_law(wrong: str, right: str, pack: Pack) -> None:
    source = find_definition(INDEXER).reference
    assert right in source
    candidate = load_candidate(pack(INDEXER, source.replace(right, wrong)))
    result = try_law(find_law(SCORES), make_setting(candidate, "cpu"), 0, 12)
    assert result.status in (Status.BROKEN, Status.CRASHED), wrong


def test_scores_of_an_indexer_are_the_ranks_of_a_law() -> None:
    definition, pick = find_definition(INDEXER), Random(3)
    scores = torch.randn(4, 70).round(decimals=1)
    scores[1, 5:] = -torch.inf
    rows = draw_rows(scores, 9, 16, pick)
    inputs = index_inputs(definition, rows, CPU, pick)
    names: dict[str, Any] = {}
    exec(definition.reference, names)
    for token, row in enumerate(rows):
        found = names["score_keys"](*inputs.values(), token)
        assert found.tolist() == row.values
        own = [key for key in row.positions if key >= 0]
        assert own == sorted(own) and row.positions.count(-1) == 9
        pairs = list(zip(row.positions, row.values, strict=True))
        right = {key: float(scores[token, key]) for key in own}
        for one, rank in pairs:
            for other, other_rank in pairs:
                if one >= 0 and other >= 0:
                    assert (rank < other_rank) == (right[one] < right[other])
        assert max(rank for key, rank in pairs if key >= 0) < min(
            rank for key, rank in pairs if key < 0
        )


def test_slots_of_an_indexer_mean_the_lowest_positions_of_equal_scores() -> None:
    row = IndexedRow([0, -1, 1, 2, 3], [1, 5, 0, 1, 1], [7, 2])
    slots = [7 * 4 + 1, 7 * 4, 2 * 4]  # the larger score, and positions 0 and 3

    def positions(*changed: int, topk: int = 2) -> list[int]:
        return positions_of(list(changed), row, 4, topk)

    assert positions(*slots) == [0, 2]
    assert positions(*slots, -1) == [0, 2]
    # a smaller score instead of one of the equal ones is shown as it is
    assert positions(29, 28, 30) == [0, 1]
    for wrong, said in (
        ((29, 28, 28), "a slot twice"),
        ((29, 28, 9), "expected a slot of the request"),
        ((29, 28, 4), "expected a slot of the request"),
        ((29, 28, -2), "expected a slot of the request"),
        ((28, 30, 31), "below the 1 largest scores: expected 2"),
        ((29, 28), "1 of them below"),
    ):
        with pytest.raises(ValueError, match=said):
            positions(*wrong)


def test_a_selection_of_random_keys_is_judged_by_scores() -> None:
    definition = find_definition(INDEXER)
    for workload in workloads_of(definition):
        inputs = workload.inputs(CPU)
        (right,) = load_reference(definition)(*inputs.values())
        expect_selected(definition, inputs, right.flip(1), "slots")
        other = draw_weights(inputs, draw_seed(SystemRandom()))
        assert not torch.equal(other["weights"], inputs["weights"])
        wrong = right.clone()
        wrong[-1, 0] = -1
        with pytest.raises(Disagreement, match="different slots"):
            expect_selected(definition, inputs, wrong, "slots")
    # the last workload has more keys than are selected: one of the others instead of the best
    keys, size = int(inputs["seq_lens"][-1]), 16
    table = inputs["block_table"][-1].tolist()
    slots = {table[key // size] * size + key % size for key in range(keys)}
    wrong = right.clone()
    wrong[-1, 0] = min(slots - set(right[-1].tolist()))
    with pytest.raises(Disagreement, match="a score of"):
        expect_selected(definition, inputs, wrong, "slots")
    wrong[-1, 0] = 10**6
    with pytest.raises(Disagreement, match="slots of the request"):
        expect_selected(definition, inputs, wrong, "slots")


@pytest.mark.parametrize("is_right", [True, False])
def test_a_solution_of_an_indexer_is_traced(is_right: bool, pack: Pack) -> None:
    """A result that is stored by the address of its inputs is wrong for the next weights."""
    source = find_definition(INDEXER).reference
    if not is_right:
        source += """
computed = run
stored = {}


def run(*inputs):
    key = inputs[2].data_ptr()
    if key not in stored:
        stored[key] = computed(*inputs)
    return stored[key]
"""
    file = pack(INDEXER, source)
    operation = load_candidate(file).operations["select_keys"]
    plan = workloads_of(find_definition(INDEXER))[3].plan
    numbers = measure(operation, plan, CPU)
    if is_right:
        assert numbers == {"max_absolute_error": 0.0, "max_relative_error": 0.0}
        assert time_calls(operation, plan, CPU)["latency_ms"] > 0
    else:
        with pytest.raises(Disagreement, match="topk_indices of timed call"):
            time_calls(operation, plan, CPU)
