"""The adapters of sparse attention, with operators that compute by the reference."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.laws.sparse_attention import PLANS, build_sparse
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from torch import Tensor

ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters"
REFERENCE: Any = load_implementation("reference")
LATENTS = [
    plan
    for plan in PLANS
    if plan.head_size == 576 and plan.dtype == torch.bfloat16 and plan.kv_heads == 1
]
HEADS = [
    replace(PLANS[1], layout="separate", options=()),
    replace(PLANS[1], layout="separate"),
    PLANS[5],
]


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
            causal=causal, sinks=None if sinks is None else sinks.float()
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


def check(adapter: Any, plan: Any) -> None:
    """Compare an adapter with the reference, on a call of the law."""
    call = build_sparse(plan, torch.device("cpu"))
    out, lse = call.run(REFERENCE.sparse_attention)

    def attend(**given: Any) -> Tensor:
        options = given.pop("options", AttentionOptions())
        if options.sinks is not None:
            given["sinks"] = options.sinks.bfloat16()
        found: Tensor = adapter.sparse_attention(**given)
        return found

    found, found_lse = call.run(attend)
    torch.testing.assert_close(found, out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found_lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", LATENTS, ids=lambda plan: str(plan.seed))
def test_flashmla_attends_to_the_latents_of_the_law(flashmla: Any, plan: Any) -> None:
    assert len(LATENTS) == 3
    check(flashmla, plan)


def test_flashmla_declares_what_its_kernel_takes(flashmla: Any) -> None:
    assert flashmla.SUPPORT.operations == ["sparse_attention"]
    assert flashmla.SUPPORT.head_sizes == [576]


@pytest.mark.parametrize("plan", [*LATENTS, *HEADS], ids=lambda plan: str(plan.seed))
def test_flash_attention_3_attends_to_blocks_of_one(
    flash_attention_3: Any, plan: Any
) -> None:
    check(flash_attention_3, plan)


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
