"""Calls that the benchmark makes of other implementations, from their signatures."""

import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import AsOurs, settings_of, small
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.tools.bench import Benchmark
from pagetwin.tools.bench.accuracy import find_expected
from pagetwin.tools.bench.inputs import draw_inputs
from pagetwin.tools.bench.libraries import all_libraries, choose_libraries
from pagetwin.tools.bench.libraries.flash_attention_3 import FlashAttention3
from pagetwin.tools.bench.libraries.flash_mla import FlashMLA
from pagetwin.tools.bench.libraries.library import Declined, describe_origin
from pagetwin.tools.bench.workloads import Workload, load_workloads

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)


def test_xformers_is_asked_as_the_backend_asks_it(xformers: None) -> None:
    everyone = choose_libraries(all_libraries("cpu"), ["xformers"])
    assert [library.name for library in everyone] == ["ours", "xformers"]
    libraries = [AsOurs("cpu"), everyone[1]]
    record = Benchmark(settings_of("decode-16x512", "write-8k"), libraries).run()
    decode, write = (
        workload["results"]["xformers"] for workload in record["workloads"]
    )
    assert decode["status"] == "timed", decode
    assert write["reason"] == "its paged operator is for decodes"


def test_arguments_of_flash_attention_3_go_by_their_names() -> None:
    """An operator that gained an argument that may be left out still gets the others right."""
    library = torch.library.Library("pagetwin_fake_fa3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? later, Tensor? out, Tensor?"
        " cu_seqlens_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor?"
        " page_table, float softmax_scale, bool is_causal, int window_size_left, int"
        " window_size_right, float softcap, Tensor? scheduler_metadata, int num_splits)"
        " -> Tensor"
    )
    library.define(
        "get_scheduler_metadata(int batch_size, int num_heads, int num_heads_k, int"
        " headdim, ScalarType qkv_dtype, Tensor seqused_k, int? page_size, bool is_causal,"
        " bool? pack_gqa) -> Tensor"
    )
    seen: dict[str, Any] = {}

    def fwd(q, k, v, later, out, starts, lens, most_q, most_k, table, *rest):  # type: ignore[no-untyped-def]
        from pagetwin.reference.attention.paged import paged_attention

        seen["rest"], seen["later"] = rest, later
        out.copy_(paged_attention(q, k, v, table, starts, lens, most_q, most_k))
        return out.clone()

    def plan(batch, heads, kv_heads, size, dtype, lens, page, causal, pack):  # type: ignore[no-untyped-def]
        seen["plan"] = (batch, heads, kv_heads, size, page, causal, pack)
        return torch.zeros(1)

    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", plan, "CPU")
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops.pagetwin_fake_fa3
    inputs = draw_inputs(small("decode-256-ragged"), 0, "cpu")
    prepared = peer.prepare(inputs)
    found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
    assert found.ok, found.message
    assert seen["later"] is None
    assert seen["plan"] == (2, 4, 2, 32, 16, True, None)
    scale, causal, left, right, cap, metadata, splits = seen["rest"]
    assert (causal, left, right, cap, splits) == (True, -1, -1, 0.0, 0)
    assert scale == pytest.approx(32**-0.5) and metadata is not None


@pytest.fixture
def operators_of_flash_attention_3() -> Any:
    """Return operators with FlashAttention-3's arguments, computed by the reference."""
    from pagetwin.reference.attention.paged import paged_attention

    library = torch.library.Library("pagetwin_option_fa3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q,"
        " Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,"
        " float softmax_scale, bool is_causal, int window_size_left, float softcap, Tensor?"
        " s_aux) -> Tensor[]"
    )
    library.define(
        "get_scheduler_metadata(int batch_size, int headdim, int headdim_v, bool has_softcap)"
        " -> Tensor"
    )
    plans: list[tuple[Any, ...]] = []

    def fwd(
        q,
        k,
        v,
        q_v,
        out,
        starts,
        lens,
        most_q,
        most_k,
        table,
        scale,
        causal,
        left,
        cap,
        sinks,
    ):  # type: ignore[no-untyped-def]
        if q_v is not None:
            q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
        lse = torch.empty(q.shape[1], q.shape[0])
        options = AttentionOptions(
            causal=causal,
            sliding_window=None if left < 0 else left + 1,
            logits_soft_cap=cap or None,
            sinks=None if sinks is None else sinks.float(),
        )
        found = paged_attention(
            q, k, v, table, starts, lens, most_q, most_k, scale, lse=lse, options=options,
            out=q.new_empty(*q.shape[:2], v.shape[-1]),
        )  # fmt: skip
        if out is not None:
            out.copy_(found)
        return [found, lse]

    def plan(*given: Any) -> torch.Tensor:
        plans.append(given)
        return torch.zeros(1)

    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", plan, "CompositeExplicitAutograd")
    yield SimpleNamespace(library=library, plans=plans)


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("prefill-4x3k-sinks-swa256-d64", [(2, 32, 32, False)]),
        ("prefill-1x6k-cap30-d256", [(1, 32, 32, True)]),
        ("prefill-1x8k-d192-v128", [(1, 48, 32, False)]),
        ("mla-verify-q2-128h-64x4k", [(2, 16, 32, False)]),
        ("cascade-128x4k+256", [(1, 32, 32, False), (2, 32, 32, False)]),
    ],
)
def test_flash_attention_3_gets_the_options_of_a_workload(
    operators_of_flash_attention_3: Any, name: str, planned: list[Any]
) -> None:
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops.pagetwin_option_fa3
    inputs = draw_inputs(small(name), 0, "cpu")
    prepared = peer.prepare(inputs)
    found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
    assert found.ok, found.message
    assert operators_of_flash_attention_3.plans == planned


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("prefill-2x4k-alibi", "ALiBi"), ("invariant-decode-64x4k", "batch invariance")],
)
def test_flash_attention_3_declines_what_it_lacks(name: str, lacking: str) -> None:
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops
    with pytest.raises(Declined, match=f"does not support {lacking} here"):
        peer.prepare(draw_inputs(small(name), 0, "cpu"))


def test_flashmla_reuses_the_schedule_of_its_first_call() -> None:
    from pagetwin.reference.attention.paged import paged_attention

    library = torch.library.Library("pagetwin_fake_flashmla", "DEF")
    library.define(
        "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor"
        " block_table, float softmax_scale, bool is_causal, Tensor? metadata, Tensor?"
        " num_splits, Tensor? out) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    plans: list[Any] = []

    def decode(q, cache, size, lens, table, scale, causal, metadata, splits, out):  # type: ignore[no-untyped-def]
        plans.append((metadata, splits))
        reqs, new = q.shape[:2]
        rows = q.flatten(0, 1)
        starts = torch.arange(reqs + 1, dtype=torch.int32) * new
        found = paged_attention(
            rows, cache, cache[..., :size], table, starts, lens, new, int(lens.max()), scale,
            out=rows.new_empty(*rows.shape[:2], size), options=AttentionOptions(causal=causal),
        )  # fmt: skip
        return (
            found.view(reqs, new, -1, size),
            torch.zeros(1),
            torch.ones(1),
            torch.ones(2),
        )

    library.impl("dense_decode_fwd", decode, "CPU")
    peer = FlashMLA("cpu")
    peer._decode = torch.ops.pagetwin_fake_flashmla.dense_decode_fwd
    inputs = draw_inputs(small("mla-verify-q2-128h-64x4k"), 0, "cpu")
    prepared = peer.prepare(inputs)
    out = prepared.rows(prepared.call())
    found = find_expected(inputs).check(out, torch.bfloat16)
    assert found.ok, found.message
    assert plans[0] == (None, None)
    assert [tensor.shape for tensor in plans[1]] == [(1,), (2,)]
    with pytest.raises(Declined, match="latent decodes only"):
        peer.prepare(draw_inputs(small("decode-16x512"), 0, "cpu"))


def test_an_operator_that_wants_unknown_arguments_is_declined() -> None:
    library = torch.library.Library("pagetwin_new_fa3", "DEF")
    library.define("fwd(Tensor q, int unheard_of) -> Tensor")
    peer = FlashAttention3("cpu")
    peer._operators = torch.ops.pagetwin_new_fa3
    inputs = draw_inputs(small("encoder-32x1500"), 0, "cpu")
    with pytest.raises(Declined, match="fwd requires unheard_of"):
        peer.prepare(inputs)


def test_vllms_kernel_gets_the_arguments_that_it_takes(monkeypatch: Any) -> None:
    from pagetwin.reference.attention.paged import paged_attention
    from pagetwin.tools.bench.libraries import vllm_triton

    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, window_size,
        block_table, causal, k_descale,
    ):  # type: ignore[no-untyped-def] # fmt: skip
        window = None if window_size[0] < 0 else window_size[0] + 1
        paged_attention(
            q, k, v, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k,
            out=out, options=AttentionOptions(causal=causal, sliding_window=window),
        )  # fmt: skip

    module = SimpleNamespace(unified_attention=unified_attention)
    monkeypatch.setitem(sys.modules, vllm_triton.ATTEND, module)
    for name in ("decode-64x4k-swa", "mixed-128x4k+2k"):
        inputs = draw_inputs(small(name), 0, "cpu")
        prepared = vllm_triton.VLLMTriton("cpu").prepare(inputs)
        found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
        assert found.ok, found.message


class Mode(IntEnum):
    """Modes of caches as vLLM names them."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    INT4_PER_TOKEN_HEAD = 4


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_vllms_kernel_gets_the_scales_of_a_format(monkeypatch: Any, form: str) -> None:
    """It was declined, because its scales were not passed."""
    from pagetwin.reference.attention.paged import paged_attention
    from pagetwin.tools.bench.libraries import vllm_triton

    modes = []

    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, block_table,
        kv_quant_mode=Mode.NONE, k_scale_cache=None, v_scale_cache=None,
    ):  # type: ignore[no-untyped-def] # fmt: skip
        modes.append(kv_quant_mode.name)
        paged_attention(
            q, k, v, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k,
            out=out, options=AttentionOptions(k_scale=k_scale_cache, v_scale=v_scale_cache),
        )  # fmt: skip

    module = SimpleNamespace(unified_attention=unified_attention)
    monkeypatch.setitem(sys.modules, vllm_triton.ATTEND, module)
    inputs = draw_inputs(
        load_workloads("formats")[f"decode-64x4k-{form}"].tiny(), 0, "cpu"
    )
    prepared = vllm_triton.VLLMTriton("cpu").prepare(inputs)
    found = find_expected(inputs).check(prepared.call(), torch.bfloat16)
    assert found.ok, found.message
    assert modes == [f"{form.upper()}_PER_TOKEN_HEAD"]
    assert prepared.rounds_more == (form == "int4")


@pytest.mark.parametrize("form", ["int8", "fp8-token", "int4"])
def test_vllms_write_gets_the_scales_of_a_format(monkeypatch: Any, form: str) -> None:
    """A format that it writes by another rule, or not at all, is declined."""
    from pagetwin.reference.cache.cache_ops import reshape_and_cache
    from pagetwin.tools.bench.accuracy import check_write
    from pagetwin.tools.bench.libraries import vllm_triton

    def write(*args: Any) -> None:
        *tensors, k_scale, v_scale, slots, mode = args
        assert mode == Mode.INT8_PER_TOKEN_HEAD
        reshape_and_cache(*tensors, slots, k_scale, v_scale)

    module = SimpleNamespace(
        triton_reshape_and_cache_flash_per_token_head_quant=write, KVQuantMode=Mode
    )
    monkeypatch.setitem(sys.modules, vllm_triton.WRITE, module)
    inputs = draw_inputs(load_workloads("formats")[f"write-8k-{form}"].tiny(), 0, "cpu")
    library = vllm_triton.VLLMTriton("cpu")
    if form != "int8":
        with pytest.raises(Declined, match=r"levels|no fp8_per_token_head"):
            library.prepare(inputs)
        return
    inputs.poison_cache()
    library.prepare(inputs).call()
    assert check_write(inputs).ok


def test_flashinfer_is_told_where_blocks_begin_and_how_full_the_last_one_is() -> None:
    from pagetwin.tools.bench.libraries.flashinfer import _flat_blocks

    workload = Workload("", "decode", "", (1, 1, 1), (16, 17, 40), 2, 1, 32)
    inputs = draw_inputs(workload, 0, "cpu")
    starts, blocks, last = _flat_blocks(inputs)
    assert starts.tolist() == [0, 1, 3, 6]
    assert last.tolist() == [16, 1, 8]
    assert blocks.tolist() == [
        *inputs.block_table[0, :1],
        *inputs.block_table[1, :2],
        *inputs.block_table[2, :3],
    ]


def test_operators_are_named_by_the_vllm_that_they_come_from(tmp_path: Path) -> None:
    """A staged package has its version in a file, an installed one beside it."""
    file = tmp_path / "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    assert describe_origin(str(file)) == "operators of _vllm_fa3_C.abi3.so"
    file.parent.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.33.0'\n")
    assert describe_origin(str(file)) == "operators of vLLM 0.33.0"
    (tmp_path / "vllm-0.34.1.dist-info").mkdir()
    assert describe_origin(str(file)) == "operators of vLLM 0.34.1"
