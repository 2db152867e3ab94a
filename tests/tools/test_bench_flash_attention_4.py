"""Calls of FlashAttention-4's compiled forms, which the reference computes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_reference import attend
from bench_runs import small
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.tools.bench.accuracy import find_expected
from pagetwin.tools.bench.inputs import draw_inputs
from pagetwin.tools.bench.libraries import flash_attention_4
from pagetwin.tools.bench.libraries.flash_attention_4 import (
    FlashAttention4,
    choose_splits,
    combine_name,
    form_of,
)
from pagetwin.tools.bench.libraries.library import Declined
from pagetwin.tools.bench.workloads import load_workloads

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from stage_flash_attention_4 import FORMS, parse_form

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the calls are those of a run without a GPU"
)


class Forms:
    """Compiled forms: a function per name, which computes what the name says."""

    def __init__(self, *lacking: str) -> None:
        self.lacking, self.called = lacking, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        if name in self.lacking:
            raise AttributeError(f"Module has no function {name!r}")
        form = parse_form(name)
        self.called.append(name)
        return self.combine if "heads" in form else lambda *given: self.fwd(form, given)

    @staticmethod
    def fwd(form: dict[str, Any], given: tuple[Any, ...]) -> None:
        q, k, v, out, out_lse, scale, starts, starts_k, *_, lens = given[:10]
        dynamic, table, left, right, sinks, blocks, aux, *last = given[10:]
        assert (dynamic, blocks, aux, last) == (None, None, (None, None), [None] * 4)
        assert (starts_k is None, table is None) == (
            form["keys"] == "paged",
            form["keys"] == "ragged",
        )
        assert (left is None, right is None) == (form["mask"] != "local",) * 2
        assert (q.shape[-1], v.shape[-1]) == (form["k"], form["v"])
        assert q.shape[1] == k.shape[-2] * form["group"]
        options = AttentionOptions(
            causal=form["mask"] == "causal" or right == 0,
            sliding_window=None if left is None else left + 1,
            logits_soft_cap=None if form["cap"] is None else float(form["cap"]),
            sinks=sinks if sinks is None else sinks.float(),
        )
        batch = {"table": table, "lens": lens, "options": options}
        found, lse = attend(q, k, v, scale, starts, **batch)
        if not form["split"]:
            assert out_lse is None
            out.copy_(found)
            return
        # the first split has all keys, the others none
        out.zero_()
        out_lse.fill_(-torch.inf)
        out[0], out_lse[0] = found, lse

    @staticmethod
    def combine(partial: Any, lse: Any, out: Any, *rest: Any) -> None:
        assert lse.stride(-2) == 1 and rest[0] is None and rest[2:] == (None,) * 5
        weights = torch.softmax(lse, 0)[..., None]
        out.copy_((weights * partial).sum(0))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("decode-256-ragged", "fwd_bf16_k32_v32_g2_causal_paged"),
        ("decode-64x4k-swa", "fwd_bf16_k32_v32_g2_local_paged"),
        ("cross-64x1500", "fwd_bf16_k32_v32_g1_full_paged"),
        ("encoder-32x1500", "fwd_bf16_k32_v32_g1_full_ragged"),
        (
            "prefill-4x3k-sinks-swa256-d64",
            "fwd_bf16_k32_v32_g2_local_paged_sinks",
        ),
        ("prefill-1x6k-cap30-d256", "fwd_bf16_k32_v32_g2_causal_paged_cap30"),
        ("prefill-1x8k-d192-v128", "fwd_bf16_k48_v32_g1_causal_paged"),
        ("prefill-1x8k-fp16", "fwd_fp16_k32_v32_g2_causal_paged"),
    ],
)
def test_flash_attention_4_calls_the_form_of_a_workload(name: str, form: str) -> None:
    peer = FlashAttention4("cpu")
    peer._functions = forms = Forms()
    inputs = draw_inputs(small(name), 0, "cpu")
    found = find_expected(inputs).check(
        peer.prepare(inputs).call(), inputs.workload.dtype
    )
    assert found.ok, found.message
    assert forms.called == [form]


def test_flash_attention_4_combines_splits(monkeypatch: Any) -> None:
    monkeypatch.setattr(flash_attention_4, "choose_splits", lambda *given: 3)
    peer = FlashAttention4("cpu")
    peer._functions = forms = Forms()
    inputs = draw_inputs(small("decode-1x128k"), 0, "cpu")
    prepared = peer.prepare(inputs)
    found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
    assert found.ok, found.message
    assert forms.called == [
        "fwd_bf16_k32_v32_g2_causal_paged_split",
        "combine_bf16_v32_h4",
    ]
    assert prepared.note == "3 splits, then its combine kernel"


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("decode-64x4k", 1),
        ("decode-16x512", 1),  # 4 tiles of keys
        ("decode-8x32k", 2),
        ("decode-1x128k", 16),
        ("decode-2x2k", 8),
        ("verify-8x8k-q32", 2),
        ("encoder-32x1500", 1),
    ],
)
def test_flash_attention_4_splits_as_its_own_estimate(name: str, splits: int) -> None:
    assert choose_splits(load_workloads("all")[name], 132) == splits


def test_the_forms_of_the_suites_are_those_that_are_compiled() -> None:
    needed = set()
    for workload in load_workloads("all").values():
        splits = choose_splits(workload, 132)
        try:
            needed.add(form_of(workload, splits).name)
        except Declined:
            continue
        if splits > 1:
            needed.add(combine_name(workload))
    assert needed == set(FORMS) and len(FORMS) == len(needed)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("write-8k", "does not write a cache"),
        ("decode-64x4k-fp8", "only in pages of as many keys as its tile"),
        ("mla-decode-128h-32x8k", "need compute capability 10"),
        ("prefill-2x4k-alibi", "does not support ALiBi here"),
        ("cascade-128x4k+256", "does not support a shared prefix here"),
        (
            "decode-16x512",
            "fwd_bf16_k32_v32_g2_causal_paged is not among its compiled forms",
        ),
    ],
)
def test_flash_attention_4_says_why_it_declines(name: str, reason: str) -> None:
    peer = FlashAttention4("cpu")
    peer._functions = Forms("fwd_bf16_k32_v32_g2_causal_paged")
    with pytest.raises(Declined, match=reason):
        peer.prepare(draw_inputs(small(name), 0, "cpu"))


def test_an_unknown_form_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="form = 'fwd_int8': expected a name"):
        parse_form("fwd_int8")
    assert parse_form("combine_bf16_v128_h32")["heads"] == 32


def test_flash_attention_4_says_what_is_missing(
    monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.delenv("PAGETWIN_FA4", raising=False)
    assert FlashAttention4("cpu").missing() == "needs a CUDA device"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "compute capability 9" in FlashAttention4("cuda").missing()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "PAGETWIN_FA4" in FlashAttention4("cuda").missing()
    library = tmp_path / "vllm/vllm_flash_attn/flash_attention_4.so"
    monkeypatch.setenv("PAGETWIN_FA4", str(library))
    monkeypatch.setattr(flash_attention_4, "has_module", lambda name: False)
    peer = FlashAttention4("cuda")
    assert peer.missing() == "tvm_ffi is not installed (pip install apache-tvm-ffi)"
    monkeypatch.setattr(flash_attention_4, "has_module", lambda name: True)
    module = SimpleNamespace(load_module=lambda path: Path(path).read_bytes())
    monkeypatch.setitem(sys.modules, "tvm_ffi", module)
    assert "cannot be used (FileNotFoundError" in peer.missing()
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.33.0'\n")
    assert peer.missing() == "" and peer.version() == "operators of vLLM 0.33.0"
