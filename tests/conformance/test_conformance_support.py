"""The declared support: which calls are made, what is reported outside of it, and its probe."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance import (
    Status,
    Support,
    check_implementation,
    flash_attention_like,
    flashinfer_like,
    reproduce,
    vllm_like,
)
from pagetwin.conformance.candidates.candidate import (
    Candidate,
    OutsideSupport,
    load_candidate,
    why_outside,
)
from pagetwin.conformance.candidates.fitting import fit_case
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.cases.choice_calls import build_call
from pagetwin.conformance.cases.option_pairs import PLAIN, draw_choice
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.running.trial import find_law, make_setting, try_law
from pagetwin.contract.attention_options import pack_options
from pagetwin.tools.cli import DISAGREE, USER_ERROR, app
from torch import Tensor
from typer.testing import CliRunner

pytestmark = pytest.mark.long

RIGHT = load_candidate("reference")
ATTENDS = "every new token attends to its sequence up to itself"
ANY = "paged attention is right under any options"
SINK = "a sink takes part in the softmax once"
CPU = torch.device("cpu")

NARROW = flash_attention_like(
    devices=None,
    dtypes=["float16"],
    cache_dtypes=["float16"],
    head_sizes=[16, 64],
    group_sizes=[1, 2, 3],
    options={
        "scale": None,
        "out": None,
        "lse": None,
        "causal": "bool",
        "sliding_window": None,
        "alibi_slopes": None,
        "sinks": None,
    },
    tensor_dtypes={"sinks": ["bfloat16"]},
    never_together=[("causal", "alibi_slopes")],
    query_lens=range(1, 21),
    seq_lens=range(1, 1 << 17),
)


def calls_of(support: Support, sentence: str, examples: int = 12) -> list[dict]:
    """Return the arguments of all calls that a law makes of a kernel with a support."""
    calls: list[dict[str, Any]] = []

    def attend(*given: Any, **named: Any) -> Tensor:
        calls.append(named)
        sinks = named.get("sinks")
        assert sinks is None or sinks.dtype == torch.bfloat16
        named |= {} if sinks is None else {"sinks": sinks.float()}
        found: Tensor = RIGHT.operations["paged_attention"](
            *given, **pack_options(**named)
        )
        return found

    candidate = Candidate("mine", {"paged_attention": attend}, support)
    result = try_law(find_law(sentence), make_setting(candidate, "cpu"), 0, examples)
    assert result.status == Status.HELD and result.cases > result.skipped, result
    return calls


@pytest.mark.parametrize("sentence", [ATTENDS, ANY, SINK])
def test_a_kernel_is_called_only_inside_of_its_support(sentence: str) -> None:
    calls = calls_of(NARROW, sentence)
    assert len(calls) >= 5
    for named in calls:
        query, cache = named["query"], named["key_cache"]
        assert query.dtype == cache.dtype == torch.float16
        assert query.shape[2] in (16, 64)
        assert query.shape[1] // cache.shape[2] in (1, 2, 3)
        assert query.stride(-1) == cache.stride(-1) == 1
        assert cache.stride(1) * 2 % 16 == 0 and cache.data_ptr() % 16 == 0
        assert set(named["query_start_loc"].diff().tolist()) <= set(range(1, 21))
        assert all(each >= 1 for each in named["seq_lens"].tolist())
        assert isinstance(named.get("causal", True), bool)
        assert named.get("causal", True) or "alibi_slopes" not in named


REASONS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "option causal = per request": ({}, {"causal": "each request"}),
    "options causal and alibi_slopes together": (
        {},
        {"causal": "no", "alibi_slopes": "slopes"},
    ),
    "group size 8": ({}, {"group": "8"}),
    "KV layout HND": ({}, {"layout": "hnd"}),
    "key_cache that is not rows": ({}, {"layout": "every other element"}),
    "key_cache that is not aligned to 16 bytes": ({}, {"layout": "padded"}),
    "query that is not packed": ({"strides": {"query": "packed"}}, {"query": "fused"}),
    "33 new tokens of a request": ({}, {"batch": "mixed"}),
    "block size 24": ({"block_sizes": [16]}, {"block_size": "24"}),
    "option sliding_window = 7": (
        {"options": {"sliding_window": [33]}, "never_together": ()},
        {"sliding_window": "7"},
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_call_that_is_outside_says_why(reason: str) -> None:
    changes, option = REASONS[reason]
    if "options" in changes:
        changes = changes | {"tensor_dtypes": {}}
    support = replace(NARROW, **changes)
    inside = {"dtype": "float16", "batch": "prefill", "head_size": "64"}
    inside |= {"query": "apart"}
    call = build_call(PLAIN | inside | option, 7, CPU)
    lens = {"query_lens": None} if "new tokens" not in reason else {}
    support = replace(support, **lens)
    why = why_outside("paged_attention", pack_options(**call.arguments), support)
    assert why is not None and why.endswith(reason.split(" ", 1)[1]), why
    plain = build_call(PLAIN | inside, 7, CPU)
    roomy = replace(support, query_lens=None)
    assert (
        why_outside("paged_attention", pack_options(**plain.arguments), roomy) is None
    )


def test_sinks_are_passed_in_the_declared_dtype_if_it_holds_them() -> None:
    seen = []
    candidate = Candidate(
        "mine",
        {"paged_attention": lambda query, *a, sinks=None, **k: seen.append(sinks)},
        Support(options=["sinks"], tensor_dtypes={"sinks": ["bfloat16"]}),
    )
    arguments = build(BatchPlan((1,), (3,))).arguments()
    arguments.pop("scale")
    for sinks in (torch.tensor([0.5, -3.0, 1.0, 2.0]), torch.full((4,), 0.1)):
        if len(seen):
            with pytest.raises(OutsideSupport, match="sinks in float32 that bfloat16"):
                candidate.paged_attention(**pack_options(**arguments, sinks=sinks))
        else:
            candidate.paged_attention(**pack_options(**arguments, sinks=sinks))
    assert [each.dtype for each in seen] == [torch.bfloat16]


@pytest.mark.parametrize(
    "support",
    [NARROW, flash_attention_like(), flashinfer_like(), vllm_like()],
    ids=["narrow", "FlashAttention", "FlashInfer", "vLLM"],
)
def test_every_drawn_choice_is_fitted_into_the_support(support: Support) -> None:
    from random import Random

    inside = 0
    for seed in range(60):
        choice = draw_choice(Random(seed), [("operation", "paged_attention")])
        fitted = fit_case(choice, support)
        assert fit_case(fitted, support) == fitted
        call = build_call(fitted, seed, CPU)
        call = call.changed(max_query_len=max(call.query_lens))
        why = why_outside("paged_attention", pack_options(**call.arguments), support)
        # requests without keys, and a block that starts at an odd address, cannot be fitted
        assert why is None or "keys" in why or "aligned" in why, (seed, why)
        inside += why is None
    assert inside >= 40


CONTRADICTIONS = {
    "dtypes=[]": "SUPPORT.dtypes = []: expected at least one",
    "dtypes='bfloat16'": "SUPPORT.dtypes = 'bfloat16': expected a list",
    "alignment=3": "alignment = 3: expected a power of two",
    "query_lens=[9], seq_lens=[4]": "expected new tokens that a sequence can hold",
    "options={'causal': 'boolean'}": "options['causal'] has 'boolean'",
    "options=['sink']": "SUPPORT.options has 'sink': expected names of options, such as",
    "options=[], never_together=[('causal', 'sinks')]": "which options lacks",
    "options=[], cache_dtypes=['float8_e4m3fn']": "options lacks 'k_scale'",
    "options=[], tensor_dtypes={'sinks': ['bfloat16']}": "which options lacks",
    "strides={'query': 'dense'}": "expected 'packed' or 'packed heads' or 'rows'",
    "head_sizes=[0]": "head_sizes has 0: expected at least 1",
    "devices=['sm_90']": "does not support device cpu; SUPPORT declares sm_90",
}


WRONG_TYPES: dict[str, tuple[Any, str]] = {
    "head_sizes": (["128"], "has '128': expected whole numbers"),
    "block_sizes": (16, "= 16: expected a list"),
    "alignment": ("16", "= '16': expected a number of bytes"),
    "strides": (["query"], "= ['query']: expected a mapping by argument"),
    "never_together": (["causal", "sinks"], "has 'causal': expected pairs of options"),
}


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_a_field_of_the_wrong_type_is_named_with_its_value(field: str) -> None:
    """Strings as head sizes raised "'<' not supported between 'str' and 'int'"."""
    value, sentence = WRONG_TYPES[field]
    fields = {"options": ["causal", "sinks"]} | {field: value}
    with pytest.raises(ValueError, match=re.escape(f"SUPPORT.{field} {sentence}")):
        Support(**fields)


@pytest.mark.long
@pytest.mark.parametrize("fields", CONTRADICTIONS)
def test_a_support_that_contradicts_itself_is_one_sentence(
    tmp_path: Path, fields: str
) -> None:
    file = tmp_path / "contradicts.py"
    file.write_text(
        "from pagetwin.conformance import Support\n"
        f"SUPPORT = Support({fields})\n"
        "def paged_attention(): pass\n"
    )
    script = "import sys; from pagetwin.tools.cli import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", script, "check", str(file), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == USER_ERROR, done.stderr
    assert CONTRADICTIONS[fields] in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# ---- outside

WRONG_OUTSIDE = """
import torch
from pagetwin.conformance import Support
from pagetwin.contract.attention_options import pack_options
from pagetwin.reference import paged_attention as right

SUPPORT = Support(
    operations=["paged_attention"], head_sizes=[16], dtypes=["float32"], rejects=REJECTS
)

def paged_attention(query, *arguments, **given):
    if query.shape[2] == 24:
        raise ValueError("head size 24")
    found = right(query, *arguments, **pack_options(**given))
    return found if query.shape[2] == 16 else found.add_(1)
"""


@pytest.mark.long
@pytest.mark.parametrize("promises", [False, True])
def test_what_is_wrong_outside_of_the_support_is_reported_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promises: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"outside_{tmp_path.name}"
    rejects = "['undeclared']" if promises else "[]"
    Path(f"{name}.py").write_text(WRONG_OUTSIDE.replace("REJECTS", rejects))
    options: dict[str, Any] = {"only": ATTENDS, "device": "cpu", "isolated": False}
    inside = check_implementation(name, **options)
    assert inside.ok and inside.results[0].status == Status.HELD and not inside.outside
    report = check_implementation(name, outside=True, **options)
    (result,) = report.results
    (beyond,) = report.outside
    assert result.status == Status.HELD
    assert beyond.status == Status.BROKEN and "head_size=16" not in beyond.case
    assert report.ok is not promises
    assert [how for how, _ in report.outcomes_outside()] == ["wrong"]
    assert "## Outside of the declared support" in report.to_markdown()
    program = report.reproducer(beyond)
    assert "outside=True" in program
    with pytest.raises(Disagreement):
        reproduce(name, ATTENDS, beyond.case, "cpu", outside=True)
    words = ["check", name, "--only", ATTENDS, "--device", "cpu", "--outside"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == (DISAGREE if promises else 0), shown.output
    assert f"wrong: {ATTENDS}" in shown.output


def test_an_undeclared_law_says_what_it_needs() -> None:
    support = Support(operations=["paged_attention"], options=["out", "lse"])
    candidate = Candidate("mine", RIGHT.operations, support)
    result = try_law(find_law(SINK), make_setting(candidate, "cpu"), 0, 4)
    assert (result.status, result.reason) == (Status.OUTSIDE, "option sinks")


# ---- probing

CHOOSY = """
import torch
from pagetwin.reference import paged_attention as right
from pagetwin.contract.attention_options import pack_options

def paged_attention(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, max_query_len,
    max_seq_len, out=None, causal=True, sliding_window=None, sinks=None,
):
    if query.dtype == torch.float32 or query.shape[2] % 64:
        raise ValueError("float16 and bfloat16, head sizes 64, 128, ...")
    if key_cache.stride(1) < key_cache.stride(2) or not isinstance(causal, bool):
        raise ValueError("NHD, one flag")
    if sliding_window is not None and not causal:
        raise ValueError("windows are causal")
    if sinks is not None and sinks.dtype != torch.bfloat16:
        raise ValueError("only bf16 for S aux")
    given = dict(causal=causal, sliding_window=sliding_window)
    given["sinks"] = None if sinks is None else sinks.float()
    return right(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, max_query_len,
        max_seq_len, out=out, **pack_options(**given)
    )
"""


@pytest.mark.long
def test_a_probe_finds_a_support_that_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"choosy_{tmp_path.name}"
    Path(f"{name}.py").write_text(CHOOSY)
    done = CliRunner().invoke(app, ["check", name, "--probe", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    names: dict[str, Any] = {}
    exec(done.output, names)
    found: Support = names["SUPPORT"]
    assert set(found.dtypes or ()) == {"float16", "bfloat16"}
    assert set(found.head_sizes or ()) == {64, 128, 192, 256, 512}
    assert found.kv_layouts == ["NHD"] and found.block_sizes is None
    assert found.tensor_dtypes == {"sinks": ["bfloat16"]}
    assert dict(found.options or {}) == {
        "out": None,
        "causal": ["bool"],
        "sliding_window": None,
        "sinks": None,
        "value_head_size": None,
    }
    assert [set(each) for each in found.never_together] == [
        {"causal", "sliding_window"}
    ]
    assert "# wrong" not in done.output
    Path(f"{name}.py").write_text(done.output + CHOOSY)
    again = CliRunner().invoke(
        app, ["check", name, "--only", "attends", "--device", "cpu"]
    )
    assert again.exit_code == 0, again.output


def test_a_report_of_errors_says_how_to_declare_what_the_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"raises_{tmp_path.name}"
    Path(f"{name}.py").write_text(
        "def paged_attention(*given, **named): raise ValueError('not today')\n"
    )
    words = ["check", name, "--only", "an empty batch gives", "--device", "cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == DISAGREE, done.output
    assert done.output.rstrip().endswith(f"pagetwin check {name} --probe")


@pytest.mark.long
def test_a_probe_of_a_kernel_that_takes_nothing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"nothing_{tmp_path.name}"
    Path(f"{name}.py").write_text(
        "def paged_attention(*given, **named): raise ValueError('not today')\n"
    )
    done = CliRunner().invoke(app, ["check", name, "--probe", "--device", "cpu"])
    assert done.exit_code == USER_ERROR
    assert "no call of paged_attention succeeded" in done.output
    assert "not today" in done.output
