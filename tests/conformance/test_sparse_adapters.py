"""The adapters of sparse attention, with operators that compute by the reference."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance import Status
from pagetwin.conformance.candidates.candidate import Candidate
from pagetwin.conformance.laws.sparse_attention import PLANS
from pagetwin.conformance.running.trial import find_law, make_setting, try_law
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation

ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters"
REFERENCE: Any = load_implementation("reference")
LAWS = (
    "a query attends to the slots that its row names",
    "sparse attention writes its output alone",
)


def load(name: str, variable: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> Any:
    """Return an adapter, whose operators are defined already."""
    file = tmp_path / "operators.so"
    file.touch()
    patch.setenv(variable, str(file))
    patch.setattr(torch.ops, "load_library", lambda path: None)
    spec = importlib.util.spec_from_file_location(name, ADAPTERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def flashmla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the adapter; its operator has the kernel's conventions for empty rows and sinks."""
    library = torch.library.Library("_flashmla_C", "FRAGMENT")
    library.define(
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v,"
        " Tensor? attn_sink, Tensor? topk_length, Tensor? out_) -> Tensor[]"
    )

    def prefill(q, kv, indices, scale, size, sink, lens, out):  # type: ignore[no-untyped-def]
        tokens, heads, _ = q.shape
        assert heads in (8, 16, 32, 64, 128) and indices.shape[2] % 128 == 0
        lse = torch.empty(heads, tokens)
        cache = kv[:, None]
        found = REFERENCE.sparse_attention(
            q, cache, cache[..., :size], indices[:, 0], scale, lse=lse
        )
        if sink is not None:
            share = torch.sigmoid(lse.T - sink)
            found = (found * share[..., None]).to(q.dtype)
        empty = (indices[:, 0] < 0).all(1)
        found[empty] = torch.nan
        lse[:, empty] = torch.inf
        return [found, lse.T.clone(), lse.T.clone()]

    library.impl("sparse_prefill_fwd", prefill, "CPU")
    yield load("flashmla_sparse", "PAGETWIN_FLASHMLA", tmp_path, monkeypatch)
    library._destroy()


@pytest.fixture
def flash_attention_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the adapter; its operator gives infinity as log-sum-exp of a row without keys."""
    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v, Tensor? cu_seqlens_q, Tensor?"
        " seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, float"
        " softmax_scale, bool is_causal, float softcap, Tensor? s_aux) -> Tensor[]"
    )

    def fwd(
        q, k, v, q_v, starts, lens, most_q, most_k, table, scale, causal, cap, sinks
    ):  # type: ignore[no-untyped-def]
        assert k.shape[1] == v.shape[1] == 1 and not causal
        assert bool((table >= 0).all())
        if q_v is not None:
            q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
        lse = torch.empty(q.shape[1], q.shape[0])
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        options = AttentionOptions(
            causal=causal,
            sinks=None if sinks is None else sinks.float(),
            logits_soft_cap=cap or None,
        )
        REFERENCE.paged_attention(
            q, k, v, table, starts, lens, most_q, most_k, scale, out=out, lse=lse,
            options=options,
        )  # fmt: skip
        lse[:, lens == 0] = torch.inf
        return [out, lse]

    library.impl("fwd", fwd, "CPU")
    yield load("flash_attention_3_sparse", "PAGETWIN_FA3", tmp_path, monkeypatch)
    library._destroy()


def expect_held(adapter: Any, law: str) -> None:
    """Check an adapter by a law on the CPU, in all of its cases."""
    support = replace(adapter.SUPPORT, devices=None)
    operations = {"sparse_attention": adapter.sparse_attention}
    candidate = Candidate("adapter", operations, support)
    result = try_law(find_law(law), make_setting(candidate, "cpu"), 0, 20)
    assert result.status == Status.HELD, result
    assert result.cases >= 1 and not result.skipped


@pytest.mark.parametrize("law", LAWS)
def test_flashmla_attends_to_selected_latents(flashmla: Any, law: str) -> None:
    expect_held(flashmla, law)


def test_plans_for_a_kernel_of_latents_are_latents(flashmla: Any) -> None:
    for plan in PLANS:
        fitted = plan.within(flashmla.SUPPORT)
        assert (fitted.kv_heads, fitted.head_size, fitted.value_size) == (1, 576, 512)
        assert fitted.dtype == torch.bfloat16
        assert set(fitted.options) <= {"sinks"}
        heads = fitted.group, plan.kv_heads * plan.group
        assert heads[0] == heads[1]


@pytest.mark.parametrize("law", LAWS)
def test_flash_attention_3_attends_to_blocks_of_one(
    flash_attention_3: Any, law: str
) -> None:
    expect_held(flash_attention_3, law)


def test_plans_keep_what_a_kernel_takes(flash_attention_3: Any) -> None:
    support = flash_attention_3.SUPPORT
    assert PLANS[9].within(support) == PLANS[9]
    assert PLANS[5].within(support) == PLANS[5]
    assert PLANS[1].within(support) == PLANS[1]
    # values of 16 elements are not taken, nor any other size below 24
    assert PLANS[2].within(support).value_size is None
    sizes = replace(support, block_sizes=[16], head_sizes=[64])
    fitted = PLANS[0].within(sizes)
    assert (fitted.num_blocks, fitted.block_size, fitted.head_size) == (3, 16, 64)


@pytest.mark.parametrize("name", ["flashmla_sparse", "flash_attention_3_sparse"])
def test_an_adapter_without_its_operators_names_the_variable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "PAGETWIN_FLASHMLA" if name[5] == "m" else "PAGETWIN_FA3"
    monkeypatch.delenv(variable, raising=False)
    spec = importlib.util.spec_from_file_location(name, ADAPTERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=f"set {variable}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
