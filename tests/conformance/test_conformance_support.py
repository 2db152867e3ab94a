"""The declared support: which calls are made, what is reported outside of it, and its probe."""

from collections.abc import Callable
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
    load_candidate,
    why_outside,
)
from pagetwin.conformance.candidates.fitting import fit_case
from pagetwin.conformance.cases.choice_calls import build_call
from pagetwin.conformance.cases.option_pairs import draw_choice
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.running.trial import find_law, make_setting, try_law
from pagetwin.contract.attention_options import pack_options
from pagetwin.tools.cli import DISAGREE, app
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
        assert all(seq_len >= 1 for seq_len in named["seq_lens"].tolist())
        assert isinstance(named.get("causal", True), bool)
        assert named.get("causal", True) or "alibi_slopes" not in named


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
    write_module: Callable[[str], str], promises: bool
) -> None:
    rejects = "['undeclared']" if promises else "[]"
    name = write_module(WRONG_OUTSIDE.replace("REJECTS", rejects))
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
    write_module: Callable[[str], str],
) -> None:
    name = write_module(CHOOSY)
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
    assert [set(pair) for pair in found.never_together] == [
        {"causal", "sliding_window"}
    ]
    assert "# wrong" not in done.output
    Path(f"{name}.py").write_text(done.output + CHOOSY)
    again = CliRunner().invoke(
        app, ["check", name, "--only", "attends", "--device", "cpu"]
    )
    assert again.exit_code == 0, again.output


def test_a_report_of_errors_says_how_to_declare_what_the_kernel_takes(
    write_module: Callable[[str], str],
) -> None:
    name = write_module(
        "def paged_attention(*given, **named): raise ValueError('not today')\n"
    )
    words = ["check", name, "--only", "an empty batch gives", "--device", "cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == DISAGREE, done.output
    assert done.output.rstrip().endswith(f"pagetwin check {name} --probe")
