"""Calls of other implementations over selected keys, from their signatures."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.tools.bench import load_workloads
from pagetwin.tools.bench.libraries.flash_attention_3 import FlashAttention3
from pagetwin.tools.bench.libraries.library import Declined
from pagetwin.tools.bench.libraries.sparse import vllm_triton as vllm_sparse
from pagetwin.tools.bench.libraries.sparse.flash_mla import (
    FlashMLARecords,
    FlashMLASparse,
)
from pagetwin.tools.bench.libraries.sparse.torch_products import TorchScores, TorchTopk
from pagetwin.tools.bench.libraries.xformers_split_k import XFormers
from pagetwin.tools.bench.sparse.accuracy import find_any_expected
from pagetwin.tools.bench.sparse.inputs import AnyInputs, SparseInputs, draw_any_inputs
from torch import Tensor

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)
REFERENCE: Any = load_implementation("reference")


def drawn(name: str, **changes: Any) -> AnyInputs:
    """Return inputs of a tiny version of a workload."""
    workload = load_workloads("sparse")[name].tiny()
    return draw_any_inputs(replace(workload, **changes), 0, "cpu")


def real_latents(heads: int = 8, tokens: int = 3) -> SparseInputs:
    """Return few tokens on few latents of the size that kernels have."""
    found = drawn(
        "sparse-mla-8h-16x32k", query_lens=(1, tokens - 1), kv_lens=(9, 6),
        query_heads=heads, head_size=576, value_head_size=512, block_size=64, selected=8,
    )  # fmt: skip
    assert isinstance(found, SparseInputs)
    return found


def attend(query: Tensor, latents: Tensor, slots: Tensor, scale: float) -> Tensor:
    """Return the reference's attention over latents [slots, 576] in float32."""
    cache = latents.float()[:, None, None]
    found: Tensor = REFERENCE.sparse_attention(
        query.float(), cache, cache[..., :512], slots, scale
    )
    return found.to(query.dtype)


def check(inputs: AnyInputs, library: Any) -> Any:
    """Return the accuracy of a library's output."""
    prepared = library.prepare_any(inputs)
    dtype = inputs.workload.dtype
    return find_any_expected(inputs).check(prepared.rows(prepared.call()), dtype)


def test_flashmla_gets_latents_and_one_row_of_slots_per_token() -> None:
    library = torch.library.Library("pagetwin_sparse_flashmla", "DEF")
    library.define(
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v,"
        " Tensor? attn_sink, Tensor? topk_length, Tensor? out_) -> Tensor[]"
    )

    def prefill(q, kv, indices, scale, size, sink, lens, out):  # type: ignore[no-untyped-def]
        assert (size, sink, lens, out) == (512, None, None, None)
        assert kv.shape[1:] == (1, 576) and indices.shape[1] == 1
        return [
            attend(q, kv[:, 0], indices[:, 0], scale),
            torch.zeros(1),
            torch.ones(1),
        ]

    library.impl("sparse_prefill_fwd", prefill, "CPU")
    flashmla = FlashMLASparse("cpu")
    flashmla._decode = torch.ops.pagetwin_sparse_flashmla.sparse_prefill_fwd
    found = check(real_latents(), flashmla)
    assert found.ok, found.message
    for name in ("sparse-gqa-1x32k", "score-1x4k", "select-1x4k"):
        with pytest.raises(Declined, match=r"latents only|no indexer|not select"):
            flashmla.prepare_any(drawn(name))
    flashmla.device = "cuda"
    with pytest.raises(Declined, match="its latents have 576 elements"):
        flashmla.prepare_any(drawn("sparse-mla-8h-16x32k"))
    smaller = replace(real_latents().workload, block_size=16)
    with pytest.raises(Declined, match="its blocks have 64 tokens"):
        flashmla.prepare_any(replace(real_latents(), workload=smaller))


def test_flashmla_reads_the_same_latents_from_records_with_padded_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = torch.library.Library("pagetwin_record_flashmla", "DEF")
    library.define(
        "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor?"
        " attn_sink, Tensor? metadata, Tensor? num_splits, Tensor? extra_kv, Tensor?"
        " extra_indices, Tensor? extra_topk_length, int d_v, float sm_scale, Tensor?"
        " out_=None, bool enable_batch_invariant=False) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    plans: list[Any] = []

    def decode(q, kv, indices, lens, sink, metadata, splits, *rest):  # type: ignore[no-untyped-def]
        # arguments at their default are left out of a call from Python
        extra, other, counts, size, scale = rest
        assert (lens, sink, extra, other, counts) == (None,) * 5
        assert (size, kv.dtype) == (512, torch.uint8)
        assert q.shape[1:] == (1, 64, 576) and kv.shape[1:] == (64, 1, 656)
        plans.append((metadata, splits))
        blocks = torch.arange(len(kv), dtype=torch.int32)[None]
        lens = torch.tensor([len(kv) * 64], dtype=torch.int32)
        latents = torch.empty(int(lens), 576, dtype=q.dtype)
        REFERENCE.gather_latent_cache(
            kv[:, :, 0],
            latents,
            blocks,
            torch.tensor([0, int(lens)], dtype=torch.int32),
        )
        found = attend(q[:, 0], latents, indices[:, 0], scale)
        return found[:, None], torch.zeros(1), torch.ones(1), torch.ones(2)

    library.impl("sparse_decode_fwd", decode, "CPU")
    monkeypatch.setattr(
        "pagetwin.tools.bench.libraries.sparse.flash_mla.load_implementation",
        lambda _: REFERENCE,
    )
    flashmla = FlashMLARecords("cpu")
    flashmla._decode = torch.ops.pagetwin_record_flashmla.sparse_decode_fwd
    prepared = flashmla.prepare_any(real_latents())
    assert prepared.rounds_more and not prepared.same_work
    found = find_any_expected(real_latents()).check(
        prepared.rows(prepared.call()), torch.bfloat16
    )
    # codes of 8 bits
    assert 0.005 < found.error < 0.05, found
    assert plans[0] == (None, None)
    assert [tensor.shape for tensor in plans[1]] == [(1,), (2,)]


@pytest.mark.parametrize("name", ["sparse-mla-16h-16x32k", "sparse-gqa-16x32k"])
def test_flash_attention_3_gets_slots_as_blocks_of_one(name: str) -> None:
    library = torch.library.Library(f"pagetwin_{name[7:10]}_fa3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v, Tensor? out, Tensor?"
        " cu_seqlens_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor?"
        " page_table, float softmax_scale) -> Tensor"
    )
    library.define(
        "get_scheduler_metadata(int batch_size, int headdim, int page_size, Tensor"
        " seqused_k) -> Tensor"
    )

    def fwd(q, k, v, q_v, out, starts, lens, most_q, most_k, table, scale):  # type: ignore[no-untyped-def]
        assert k.shape[1] == 1 and (most_q, most_k) == (1, 16)
        if q_v is not None:
            q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
        REFERENCE.paged_attention(
            q, k, v, table, starts, lens, most_q, most_k, scale, out=out
        )
        return out.clone()

    library.impl("fwd", fwd, "CPU")
    plans = []
    library.impl(
        "get_scheduler_metadata",
        lambda *sizes: plans.append(sizes[:3]) or torch.zeros(1),
        "CPU",
    )
    flash = FlashAttention3("cpu")
    flash._operators = getattr(torch.ops, f"pagetwin_{name[7:10]}_fa3")
    found = check(drawn(name), flash)
    assert found.ok, found.message
    # a latent of 48 elements has 16 of rope
    assert plans == [(2, 16 if "mla" in name else 32, 1)]


def test_vllms_decode_gets_slots_as_pages_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(q, k, v, o, lse, table, lens, parts, splits, scale, size, is_mla):  # type: ignore[no-untyped-def]
        assert (size, parts.shape[2], splits) == (1, 1, 1)
        assert is_mla == (v.shape[-1] < k.shape[-1])
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        REFERENCE.paged_attention(
            q, k, v, table, starts, lens, 1, int(lens.max()), scale, out=o,
            options=AttentionOptions(causal=False),
        )  # fmt: skip

    module = SimpleNamespace(decode_attention_fwd=decode)
    monkeypatch.setitem(sys.modules, vllm_sparse.DECODE, module)
    for name in ("sparse-mla-16h-16x32k", "sparse-gqa-16x32k"):
        found = check(drawn(name), vllm_sparse.VLLMDecode("cpu"))
        assert found.ok, found.message


def test_vllms_sparse_kernel_takes_latents_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interface(q, kv, indices, scale, size):  # type: ignore[no-untyped-def]
        assert size == 512
        return attend(q, kv[:, 0], indices[:, 0], scale), None, None

    module = SimpleNamespace(triton_bf16_mla_sparse_interface=interface)
    monkeypatch.setitem(sys.modules, vllm_sparse.SPARSE, module)
    library = vllm_sparse.VLLMSparse("cpu")
    found = check(real_latents(heads=3), library)
    assert found.ok, found.message
    with pytest.raises(Declined, match="values of 512 elements only"):
        library.prepare_any(drawn("sparse-gqa-1x32k"))
    # a cache of 2**31 elements without its memory
    large = torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16).expand(2**22, 1, 1, 512)
    with pytest.raises(Declined, match="offsets in the cache have 32 bits"):
        library.prepare_any(replace(real_latents(), key_cache=large))


def test_vllms_indexer_gets_a_workspace_and_pages_of_one_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []

    def score(q, cache, weights, lens, table, most):  # type: ignore[no-untyped-def]
        assert started == [torch.device("cpu")] and q.dim() == cache.dim() == 4
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        return REFERENCE.index_scores(
            q[:, 0], weights, cache[:, :, 0], table, starts, lens, most
        )

    workspace = SimpleNamespace(
        is_workspace_manager_initialized=lambda: bool(started),
        init_workspace_manager=started.append,
    )
    module = SimpleNamespace(rocm_fp8_paged_mqa_logits_triton=score)
    monkeypatch.setitem(sys.modules, vllm_sparse.INDEXER, module)
    monkeypatch.setitem(sys.modules, vllm_sparse.WORKSPACE, workspace)
    library = vllm_sparse.VLLMIndexer("cpu")
    for name in ("score-1x4k", "score-16x32k"):
        found = check(drawn(name), library)
        assert found.ok, found.message
    with pytest.raises(Declined, match="computes no attention"):
        library.prepare_any(drawn("sparse-gqa-1x32k"))
    with pytest.raises(Declined, match="one token of each request"):
        library.prepare_any(drawn("score-1x4k", query_lens=(2,)))


def test_torch_selects_the_largest_scores_and_multiplies_gathered_keys() -> None:
    assert check(drawn("select-16x32k"), TorchTopk("cpu")).ok
    found = check(drawn("score-16x32k"), TorchScores("cpu"))
    # products of float8 numbers are rounded to bfloat16
    assert not found.ok and 0 < found.error < 0.01
    with pytest.raises(Declined, match="equal lengths"):
        TorchScores("cpu").prepare_any(drawn("score-16x32k", kv_lens=(9, 7)))


def test_xformers_declines_blocks_of_one() -> None:
    with pytest.raises(Declined, match="at least 16 keys of a block"):
        XFormers("cpu").prepare_any(drawn("sparse-gqa-16x32k"))
