"""Solutions: what a file must say, how results are measured, and the verdict of each workload."""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance import Status
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.guard.interference import GUARD, expect_no_threads
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.flashinfer_bench import measuring
from pagetwin.conformance.flashinfer_bench.adapter import (
    DTYPE_OF,
    SHAPE_OF,
    load_solution,
)
from pagetwin.conformance.flashinfer_bench.definitions import find_definition
from pagetwin.conformance.flashinfer_bench.export import reference_solution
from pagetwin.conformance.flashinfer_bench.measuring import (
    FACTORS,
    draw_factors,
    expect_own_results,
    load_reference,
    measure,
    scaled,
    time_calls,
    with_baseline,
)
from pagetwin.conformance.flashinfer_bench.solutions import read_solution
from pagetwin.conformance.flashinfer_bench.timed_results import (
    InOwnDtype,
    doubled,
    expect_within_budgets,
)
from pagetwin.conformance.flashinfer_bench.workloads import (
    inputs_of,
    workloads_of,
    write_safetensors,
)
from pagetwin.conformance.running.trial import make_setting
from pagetwin.conformance.running.worker_process import measured
from torch import Tensor

CPU = torch.device("cpu")
DECODE = find_definition("gqa_paged_decode_h4_kv2_d16_ps16")
MERGE = find_definition("merge_state_h3_d16")
APPEND = find_definition("paged_kv_append_kv2_d16_ps8")
PREFILL = find_definition("gqa_paged_prefill_causal_h6_kv2_d8_ps3")
LATENT = find_definition("mla_paged_decode_h4_ckv64_kpe16_ps16")
RAGGED = find_definition("gqa_ragged_decode_h4_kv2_d16")
Pack = Callable[..., str]


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Return a function that writes a solution of DECODE, with some changes."""

    def write(source: str | None = None, **changes: Any) -> str:
        solution: dict[str, Any] = reference_solution(DECODE)
        if source is not None:
            solution["sources"][0]["content"] = source
        spec = {name: changes.pop(name) for name in list(changes) if name in SPEC}
        solution["spec"] |= spec
        solution |= changes
        path = tmp_path / f"solution_{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(solution))
        return str(path)

    return write


SPEC = ("language", "entry_point", "dependencies", "destination_passing_style")
INPUTS = ", ".join(DECODE.inputs)
SWAPPED = find_definition("mla_paged_prefill_causal_h2_ckv24_kpe24_ps16").reference


# files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name = '': expected a text"),
        ({"name": 3}, "name = 3: expected a text"),
        ({"definition": None}, "definition = None: expected a text"),
        ({"spec": []}, r"spec = \[\]: expected an object"),
        ({"sources": {}}, r"sources = {}: expected a list"),
        ({"sources": ["main.py"]}, "sources has 'main.py': expected objects"),
        ({"sources": [{"path": "main.py"}]}, "content is missing"),
        ({"sources": [{"path": "/main.py", "content": "x"}]}, "relative paths"),
        ({"sources": [{"path": "a/../main.py", "content": "x"}]}, "relative paths"),
        ({"sources": [{"path": "main.py", "content": "x"}] * 2}, "different relative"),
        ({"entry_point": "main.py"}, "expected FILE::FUNCTION"),
        ({"entry_point": "main.py::"}, "expected FILE::FUNCTION"),
        ({"entry_point": "main.py::a b"}, "expected FILE::FUNCTION"),
        ({"entry_point": "other.py::run"}, "expected FILE::FUNCTION"),
        ({"dependencies": "torch"}, "expected a list"),
        ({"language": "cpp"}, "expected python or triton"),
        ({"source": "def run(:"}, "main.py is not valid Python: "),
        ({"source": SWAPPED}, "these are the inputs of mla_paged_prefill_causal_h"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    changes: dict[str, Any], words: str, pack: Pack
) -> None:
    with pytest.raises(ValueError, match=words):
        read_solution(pack(**changes))


@pytest.mark.parametrize(
    ("source", "is_right"),
    [
        (f"def run({INPUTS}): pass", True),
        (f"def run({INPUTS}, more=1): pass", True),
        (f"def run({', '.join(list(DECODE.inputs)[:3])}, *rest): pass", True),
        ("def run(*all): pass", True),
        ("from .other import run", True),
        (f"def run({', '.join(list(DECODE.inputs)[:-1])}): pass", False),
        (f"def run({INPUTS}, more): pass", False),
        (f"def run({', '.join(reversed(list(DECODE.inputs)))}): pass", False),
    ],
)
def test_the_arguments_are_those_of_the_definition(
    source: str, is_right: bool, pack: Pack
) -> None:
    file = pack(source, destination_passing_style=False)
    if is_right:
        assert read_solution(file).arguments == list(DECODE.inputs)
        return
    with pytest.raises(
        ValueError, match=r"run takes .*: expected .* of gqa_paged_decode"
    ):
        read_solution(file)


def test_outputs_to_fill_come_after_the_inputs_under_any_name(pack: Pack) -> None:
    file = pack(f"def run({INPUTS}, o, l): pass", destination_passing_style=True)
    assert len(read_solution(file).arguments) == len(DECODE.inputs) + 2
    with pytest.raises(ValueError, match="sets destination_passing_style to false"):
        read_solution(pack(f"def run({INPUTS}): pass", destination_passing_style=True))


def test_packages_that_are_missing_are_named_and_toolchains_are_not(pack: Pack) -> None:
    read_solution(pack(dependencies=["torch >= 2", "CUTLASS_3_7"]))
    for changes in (
        {"dependencies": ["not-there"]},
        {"source": f"import not_there\n{DECODE.reference}"},
    ):
        with pytest.raises(ImportError, match=r"not.there, which is not installed"):
            read_solution(pack(**changes))


def test_the_package_of_a_solution_depends_on_its_sources(pack: Pack) -> None:
    one, other = (
        read_solution(
            pack(f"def run({INPUTS}): return {n}", destination_passing_style=False)
        )
        for n in (1, 2)
    )
    assert one.package != other.package
    assert one.package == replace(one, language="triton").package


def test_an_entry_that_does_not_exist_is_named(pack: Pack) -> None:
    with pytest.raises(ValueError, match=r"main\.py has no function other"):
        load_solution(pack(entry_point="main.py::other"))


# outputs and errors


def operation_of(file: str) -> Any:
    return load_solution(file).paged_attention


def ending(text: str) -> str:
    """Return the source of the reference with another end."""
    call = f"def run({INPUTS}):\n    output, lse = right({INPUTS})"
    return f"{DECODE.reference}\nright = run\n{call}\n    {text}\n"


PLAN = workloads_of(DECODE)[1].plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("return output, None", "lse is NoneType: expected a tensor"),
        ("return output[:, :2], lse", SHAPE_OF),
        ("return output, lse.double()", DTYPE_OF),
        ("return output", "run returned Tensor: expected the tensors output and lse"),
    ],
)
def test_outputs_of_another_kind_are_errors(text: str, words: str, pack: Pack) -> None:
    file = pack(ending(text), destination_passing_style=False)
    with pytest.raises((TypeError, ValueError), match=words):
        measure(operation_of(file), PLAN, CPU)


@pytest.mark.parametrize(
    ("text", "fills", "words"),
    [
        (
            "own_output.data = output; own_lse.copy_(lse)",
            True,
            "argument 7 other memory",
        ),
        ("lse.cpu = lse.double; return output, lse", False, "a result its own cpu"),
        ("q.data = q.clone(); return output, lse", False, "argument 0 other memory"),
    ],
)
def test_outputs_in_other_memory_and_own_methods_are_found(
    text: str, fills: bool, words: str, pack: Pack
) -> None:
    outputs = ", own_output, own_lse" if fills else ""
    source = ending(text).replace("def run(", "def right(", 1)
    source = source.replace(
        "right = run\ndef run(" + INPUTS, f"def run({INPUTS}{outputs}"
    )
    file = pack(source, destination_passing_style=fills)
    with pytest.raises(Disagreement, match=f"it gave {words}"):
        measure(operation_of(file), PLAN, CPU)


def errors_of(text: str, pack: Pack) -> dict[str, float]:
    file = pack(ending(text), destination_passing_style=False)
    return measure(operation_of(file), PLAN, CPU)


def test_errors_are_the_largest_of_both_outputs(pack: Pack) -> None:
    exact = errors_of("return output, lse", pack)
    # outputs are rounded to bfloat16, and the reference of the errors is not
    assert 0 < exact["max_absolute_error"] < 1e-1
    found = errors_of("output[0, 0, 0] += 3; return output, lse", pack)
    assert found["max_absolute_error"] == pytest.approx(3, abs=0.1)
    found = errors_of("lse[0, 0] += 5; return output, lse", pack)
    assert found["max_absolute_error"] == pytest.approx(5, abs=0.1)
    found = errors_of("lse[0, 0] *= 3; return output, lse", pack)
    assert found["max_relative_error"] >= 1.9
    found = errors_of("output[0, 0, 0] = float('nan'); return output, lse", pack)
    assert found["max_absolute_error"] == found["max_relative_error"] == math.inf


def test_latencies_are_means_in_ms_without_the_first_call(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [9.0, *[0.002] * (len(FACTORS) - 1), 9.0, *[0.006] * (len(FACTORS) - 1)]

    def timed(
        function: Callable[[], Any], device: Any, clock: Any
    ) -> tuple[float, Any]:
        return times.pop(0), function()

    monkeypatch.setattr(measuring, "_timed", timed)
    found = time_calls(operation_of(pack()), PLAN, CPU)
    assert found == {
        "latency_ms": pytest.approx(2.0),
        "reference_latency_ms": pytest.approx(6.0),
        "speedup_factor": pytest.approx(3.0),
    }
    assert not times


@pytest.mark.parametrize(
    "text",
    [
        "kept.append((output, lse)); return kept[0]",
        "kept.append((output, lse)); return kept[-2] if len(kept) > 1 else kept[0]",
        "output[0] = float('inf'); return output, lse",
    ],
)
def test_a_timed_call_has_a_result_of_its_own(text: str, pack: Pack) -> None:
    file = pack(f"kept = []\n{ending(text)}", destination_passing_style=False)
    with pytest.raises(Disagreement, match="of a timed call"):
        time_calls(operation_of(file), PLAN, CPU)


def test_a_result_that_is_written_after_the_call_does_not_count(pack: Pack) -> None:
    text = "late and late[-1].fill_(0); late.append(output); return output, lse"
    file = pack(f"late = []\n{ending(text)}", destination_passing_style=False)
    time_calls(operation_of(file), PLAN, CPU)


def test_inputs_of_a_call_in_inference_mode_are_not_kept_as_such(pack: Pack) -> None:
    """The next call wrote to tensors of inference mode, which torch does not allow."""
    call = operation_of(pack(ending("return output, lse"))).__self__
    inputs = workloads_of(DECODE)[1].inputs(CPU)
    with torch.inference_mode():
        first = call.run(inputs)
    again = call.run(inputs)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [("raise OSError('busy')", "busy"), ("output = output[:, :1]", "shape of output")],
)
def test_an_error_of_a_later_call_is_that_of_the_workload(
    text: str, words: str, pack: Pack
) -> None:
    body = f"if len(calls) > 2: {text}"
    text = f"calls.append(1)\n    {body}\n    return output, lse"
    file = pack(f"calls = []\n{ending(text)}", destination_passing_style=False)
    setting = make_setting(load_candidate(file), "cpu")
    law = "every new token attends to its sequence up to itself"
    result = measured(Result(law, "attention", Status.HELD), setting, repr(PLAN))
    assert result.status == Status.BROKEN and words in result.message
    assert result.details["measured"]["max_absolute_error"] < 0.1


def test_timed_calls_are_guarded(pack: Pack) -> None:
    GUARD.start()
    GUARD.hook()
    text = "import sys; sys._getframe(1); return output, lse"
    file = pack(ending(text), destination_passing_style=False)
    with pytest.raises(Disagreement, match=r"it called sys\._getframe"):
        time_calls(operation_of(file), PLAN, CPU)


def test_queries_are_the_same_in_all_timed_calls() -> None:
    plain = workloads_of(DECODE)[1].inputs(CPU)
    factors = {"k_cache": torch.tensor([[-0.5], [0.25]])}
    found = scaled(DECODE, PLAN, CPU, factors)
    assert torch.equal(found["q"], plain["q"])
    own, right = found["k_cache"].nan_to_num(), plain["k_cache"].nan_to_num()
    assert torch.equal(own[:, :, 0], right[:, :, 0] * -0.5)
    assert torch.equal(own[:, :, 1], right[:, :, 1] * 0.25)
    assert own.dtype == right.dtype and found["sm_scale"] == plain["sm_scale"]


@pytest.mark.parametrize("definition", [DECODE, PREFILL, MERGE, APPEND, LATENT])
def test_factors_of_timed_calls_are_drawn_per_head_and_far_apart(
    definition: Any,
) -> None:
    calls, others = draw_factors(definition), draw_factors(definition)
    names = [
        name
        for name, axes in definition.inputs.items()
        if axes is not None and len(axes) > 2 and not name.startswith("q")
    ]
    assert len(calls) == len(FACTORS) and list(calls[0]) == names
    for name in names:
        drawn = torch.stack([call[name].flatten() for call in calls])
        again = torch.stack(
            [factors_of_call[name].flatten() for factors_of_call in others]
        )
        assert not bool((drawn == again).any())
        heads = definition.constants.get("num_kv_heads", 3)
        assert drawn.shape[1] == (1 if definition is LATENT else heads)
        assert float(drawn.abs().max()) <= 1 and len(drawn.unique()) == drawn.numel()
        for one, other in combinations(drawn.double(), 2):
            larger = torch.maximum(one.abs(), other.abs())
            assert bool(((one - other).abs() >= 0.25 * larger).all())


def flash(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return DECODE computed as a kernel does: weights are rounded, sums are float32."""
    out, lse = [], []
    offsets, last = inputs["kv_indptr"].tolist(), inputs["kv_last_page_len"].tolist()
    dtype = inputs["q"].dtype
    for req, query in enumerate(inputs["q"].float()):
        pages = inputs["kv_indices"][offsets[req] : offsets[req + 1]].long()
        count = 16 * (len(pages) - 1) + last[req]
        key, value = (
            inputs[name][pages].flatten(0, 1)[:count].float().repeat_interleave(2, 1)
            for name in ("k_cache", "v_cache")
        )
        score = torch.einsum("hd,khd->hk", query, key) * inputs["sm_scale"]
        top = score.amax(1, keepdim=True)
        weights = (score - top).exp()
        total = weights.sum(1, keepdim=True)
        rounded = weights.to(dtype).float()
        out.append((torch.einsum("hk,khd->hd", rounded, value) / total).to(dtype))
        lse.append((top + total.log())[:, 0] / math.log(2))
    return torch.stack(out), torch.stack(lse)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", range(6))
def test_a_timed_result_is_judged_by_its_error_budgets(
    number: int, dtype: torch.dtype
) -> None:
    plan, run = workloads_of(DECODE)[number].plan, load_reference(DECODE)
    for call, factors in enumerate(draw_factors(DECODE)):
        inputs = scaled(DECODE, plan, CPU, factors)
        for name in ("q", "k_cache", "v_cache"):
            inputs[name] = inputs[name].to(dtype)
        own = (DECODE, run, inputs)
        found = flash(inputs)
        expect_within_budgets(*own, found, call)
        coarse = {
            name: tensor.to(torch.float8_e4m3fn).to(dtype)
            if name in factors
            else tensor
            for name, tensor in inputs.items()
        }
        with pytest.raises(Disagreement, match=f"output of timed call {call}, at"):
            expect_within_budgets(*own, flash(coarse), call)
        with pytest.raises(Disagreement, match=f"lse of timed call {call}, at"):
            expect_within_budgets(*own, (found[0], found[1] + 0.01), call)


def test_rounding_errors_are_those_of_the_dtype_of_the_inputs() -> None:
    plan, run = workloads_of(DECODE)[-1].plan, load_reference(DECODE)
    inputs = inputs_of(DECODE, plan, CPU)
    exact = run(*doubled(inputs).values())[0]
    once = (run(*inputs.values())[0] - exact).abs()
    with InOwnDtype():
        every = (run(*inputs.values())[0] - exact).abs()
    assert float(every.max()) > 2 * float(once.max()) > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("definition", [PREFILL, MERGE, APPEND, LATENT, RAGGED])
def test_a_timed_result_of_each_family_has_budgets(definition: Any) -> None:
    plan, run = workloads_of(definition)[2].plan, load_reference(definition)
    inputs = scaled(definition, plan, CPU, draw_factors(definition)[0])
    expect_within_budgets(definition, run, inputs, run(*inputs.values()), 0)
    for output in range(2):
        found = [output_found.clone() for output_found in run(*inputs.values())]
        found[output][0] *= 1.05
        with pytest.raises(Disagreement, match="of timed call 0, at"):
            expect_within_budgets(definition, run, inputs, (found[0], found[1]), 0)
        found[output][0] = math.nan
        with pytest.raises(Disagreement, match="of timed call 0, at"):
            expect_within_budgets(definition, run, inputs, (found[0], found[1]), 0)


def test_a_result_that_is_less_exact_when_it_is_timed_is_found(pack: Pack) -> None:
    text = (
        "calls.append(1); output *= 1 if len(calls) < 3 else 1.02; return output, lse"
    )
    file = pack(f"calls = []\n{ending(text)}", destination_passing_style=False)
    with pytest.raises(Disagreement, match="output of timed call 2, at"):
        time_calls(operation_of(file), PLAN, CPU)


def test_a_thread_that_a_solution_leaves_running_is_reported(pack: Pack) -> None:
    source = "import threading\nend = threading.Event()\ndef wait(): end.wait(9)\n"
    source += "every = []\n"
    text = "every.append(threading.Thread(target=wait)); every[-1].start()"
    text += "; return output, lse"
    call = operation_of(
        pack(source + ending(text), destination_passing_style=False)
    ).__self__
    try:
        with pytest.raises(Disagreement, match="it left a thread running, in wait"):
            time_calls(call.attention, PLAN, CPU)
    finally:
        own = call.function.__globals__
        own["end"].set()
        for thread in own["every"]:
            thread.join()
    expect_no_threads()


def test_the_smallest_latency_of_the_reference_counts() -> None:
    numbers = {"latency_ms": 2.0, "reference_latency_ms": 8.0, "speedup_factor": 4.0}
    slower, faster = with_baseline(numbers, 9.0), with_baseline(numbers, 3.0)
    assert slower == numbers
    assert faster == numbers | {"reference_latency_ms": 3.0, "speedup_factor": 1.5}


def test_results_are_compared_row_by_row_with_those_of_the_other_calls() -> None:
    right = [
        (torch.full((2, 1, 4), float(n)), torch.full((2, 1), float(n)))
        for n in range(3)
    ]
    near = [(a + 0.2, b - 0.2) for a, b in right]
    expect_own_results(DECODE, near, right)
    for output in range(2):
        wrong = [(a.clone(), b.clone()) for a, b in near]
        wrong[1][output][1] = 2.0
        with pytest.raises(Disagreement, match="call 1, row 1"):
            expect_own_results(DECODE, wrong, right)
        wrong[1][output][1] = math.nan
        with pytest.raises(Disagreement, match="call 1, row 1"):
            expect_own_results(DECODE, wrong, right)


# verdicts


# workloads


def test_workloads_have_identifiers_of_their_own_and_cover_the_edges() -> None:
    for definition in (DECODE, PREFILL, MERGE, APPEND):
        own = workloads_of(definition)
        assert len({workload.uuid for workload in own}) == len(own) >= 6
    for definition in (DECODE, PREFILL):
        plans: list[Any] = [
            workload_of.plan for workload_of in workloads_of(definition)
        ]
        assert max(max(plan.kv_lens) for plan in plans) > 512
        assert {"tile edge", "block edge"} <= {plan.needle for plan in plans}
        assert {"shared prefix", "scattered"} <= {plan.table for plan in plans}
        assert all(min(plan.kv_lens) > 0 for plan in plans)


def test_a_workload_says_its_variable_axes_and_where_its_tensors_are() -> None:
    workload = workloads_of(DECODE)[1]
    words = workload.to_json()
    assert not set(words["axes"]) & set(DECODE.constants)
    assert words["axes"]["batch_size"] == len(workload.inputs(CPU)["q"])
    kinds = {name: spec["type"] for name, spec in words["inputs"].items()}
    assert kinds["sm_scale"] == "scalar" and kinds["q"] == "safetensors"


def test_the_set_without_keys_is_nan_and_has_no_weight() -> None:
    (own,) = [
        workload
        for workload in workloads_of(MERGE)
        if "empty for some" in workload.title
    ]
    values, sums = list(own.inputs(CPU).values())[:2]
    assert bool(values[40:].isnan().all()) and not bool(values[:40].isnan().any())
    assert bool((sums[40:] == -math.inf).all()) and bool(sums[:40].isfinite().all())


def test_a_safetensors_file_has_aligned_offsets(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "odd name": torch.arange(3, dtype=torch.int32),
        "b": torch.arange(4).view(2, 2).T.to(torch.bfloat16),
    }
    write_safetensors(tmp_path / "t", tensors)
    data = (tmp_path / "t").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header["odd name"]["data_offsets"] == [0, 12]
    assert header["b"]["data_offsets"] == [12, 20] and header["b"]["dtype"] == "BF16"
    body = data[8 + length :]
    assert body[:12] == struct.pack("<3i", 0, 1, 2) and len(body) == 20
    found = torch.frombuffer(bytearray(body[12:]), dtype=torch.bfloat16)
    assert found.tolist() == [0.0, 2.0, 1.0, 3.0]
