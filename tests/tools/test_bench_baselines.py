"""Calls of FlashAttention-4's compiled forms, cuDNN's graphs and FlashInfer's wrappers."""

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import small
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.tools.bench.accuracy import find_expected
from pagetwin.tools.bench.inputs import draw_inputs
from pagetwin.tools.bench.libraries import cudnn_paged, flash_attention_4
from pagetwin.tools.bench.libraries.cudnn_paged import CudnnPaged
from pagetwin.tools.bench.libraries.flash_attention_4 import (
    FlashAttention4,
    choose_splits,
    combine_name,
    form_of,
)
from pagetwin.tools.bench.libraries.flashinfer import FlashInfer, FlashInferPOD
from pagetwin.tools.bench.libraries.library import Declined
from pagetwin.tools.bench.workloads import load_workloads

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from stage_flash_attention_4 import FORMS, parse_form

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the calls are those of a run without a GPU"
)


def attend(q: Any, k: Any, v: Any, scale: float, starts: Any, **given: Any) -> Any:
    """Return output and log-sum-exp by the reference, of pages if there is a table."""
    from pagetwin.reference.attention.encoder import encoder_attention
    from pagetwin.reference.attention.paged import paged_attention

    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0])
    most = int(starts.diff().max())
    more: Any = {"scale": scale, "out": out, "lse": lse, "options": given["options"]}
    if given["table"] is None:
        encoder_attention(q, k, v, starts, starts, most, most, **more)
    else:
        lens = given["lens"]
        paged_attention(
            q, k, v, given["table"], starts, lens, most, int(lens.max()), **more
        )
    return out, lse


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


class Node(SimpleNamespace):
    """A tensor of a graph, whose setters return it."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def store(value: Any) -> "Node":
            setattr(self, name.removeprefix("set_"), value)
            return self

        return store


class Graph:
    """A graph that checks what it was given, and computes it by the reference."""

    def __init__(self, **kinds: Any) -> None:
        self.built = False

    def tensor(self, **given: Any) -> Node:
        return Node(**({"ragged_offset": None} | given))

    def sdpa(self, **given: Any) -> tuple[Node, None]:
        self.given, self.out = given, Node(ragged_offset=None)
        return self.out, None

    def build(self, modes: list[str]) -> None:
        self.built = modes == ["A"]

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensors: dict[int, Any], workspace: Any, handle: Any) -> None:
        assert self.built and handle == "handle"
        given, pages = self.given, "paged_attention_k_table" in self.given
        q, k, v, out = (tensors[number] for number in range(1, 5))
        numbers = (given["seq_len_q"].uid, given["seq_len_kv"].uid)
        lens_q, lens = (tensors[number].flatten() for number in numbers)
        starts = torch.cat([lens_q.new_zeros(1), lens_q.cumsum(0).int()])
        table = None
        for node, tensor in ((given["q"], q), (self.out, out)):
            assert node.dim == [
                len(lens),
                tensor.shape[1],
                int(lens_q.max()),
                tensor.shape[-1],
            ]
            assert node.stride[1:] == [
                tensor.stride(1),
                tensor.stride(0),
                tensor.stride(2),
            ]
            if node.ragged_offset is not None:
                rows = tensors[node.ragged_offset.uid].flatten()
                assert rows.tolist() == (starts * tensor.stride(0)).tolist()
            else:
                assert int(lens_q.max()) == 1
        if pages:
            table = tensors[given["paged_attention_k_table"].uid][:, 0, :, 0]
            assert given["k"].dim == list(k.shape)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            most = given["paged_attention_max_seq_len_kv"]
            assert most == table.shape[1] * k.shape[1]
        options = AttentionOptions(
            # one new token attends to all keys anyway
            causal=given.get("use_causal_mask_bottom_right", False),
            sliding_window=given.get("diagonal_band_left_bound"),
        )
        found, _ = attend(
            q, k, v, given["attn_scale"], starts, table=table, lens=lens, options=options
        )  # fmt: skip
        out.copy_(found)


@pytest.fixture
def cudnn(monkeypatch: Any) -> Any:
    """Return a module of graphs in place of nvidia-cudnn-frontend."""
    module = ModuleType("cudnn")
    module.__spec__ = importlib.machinery.ModuleSpec("cudnn", None)
    kinds = SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32", INT32="int32")
    vars(module).update(
        data_type=kinds,
        heur_mode=SimpleNamespace(A="A"),
        pygraph=Graph,
        create_handle=lambda: "handle",
        backend_version_string=lambda: "9.19.0",
        __version__="1.32.0",
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    return module


@pytest.mark.parametrize(
    "name",
    [
        "decode-256-ragged",
        "decode-64x4k-swa",
        "verify-64x4k-q4",
        "cross-64x1500",
        "mixed-128x4k+2k",
        "prefill-1x8k-d192-v128",
        "prefill-1x8k-fp16",
        "encoder-24-ragged",
    ],
)
def test_cudnn_gets_the_tensors_of_a_workload(cudnn: Any, name: str) -> None:
    peer = CudnnPaged("cpu")
    peer._handle = "handle"
    inputs = draw_inputs(small(name), 0, "cpu")
    prepared = peer.prepare(inputs)
    found = find_expected(inputs).check(prepared.call(), inputs.workload.dtype)
    assert found.ok, found.message
    assert prepared.note == "graph built in advance"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("write-8k", "does not write a cache"),
        ("decode-64x4k-fp8", "needs FP8 queries and outputs"),
        ("prefill-1x6k-sinks-d64", "does not support sinks here"),
        ("decode-32x8k-d256-cap", "does not support a soft cap here"),
        ("mla-decode-128h-32x8k", "does not support a latent cache here"),
    ],
)
def test_cudnn_says_why_it_declines(cudnn: Any, name: str, reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        CudnnPaged("cpu").prepare(draw_inputs(small(name), 0, "cpu"))


def test_cudnn_is_named_with_both_versions(cudnn: Any, monkeypatch: Any) -> None:
    assert CudnnPaged("cpu").missing() == "needs a CUDA device"
    peer = CudnnPaged("cuda")
    assert peer.missing() == "" and peer.version() == "9.19.0, frontend 1.32.0"

    def fail() -> None:
        raise RuntimeError("cudnnHandle Create failed")

    cudnn.create_handle = fail
    assert "cannot be used (RuntimeError: cudnnHandle" in CudnnPaged("cuda").missing()
    monkeypatch.setattr(cudnn_paged, "why_no_modules", lambda *names, install: install)
    assert CudnnPaged("cuda").missing() == "nvidia-cudnn-frontend"


class Wrapper:
    """A wrapper of FlashInfer for latents or for mixed batches, which computes by the reference."""

    def __init__(self, workspace: torch.Tensor, layout: str = "NHD") -> None:
        assert workspace.dtype == torch.uint8

    def plan(self, *given: Any, **named: Any) -> None:
        self.given, self.named = given, named

    def part(self, q: Any, caches: Any, batch: Any, causal: bool) -> Any:
        """Return attention of queries over listed blocks."""
        starts, block_starts, blocks, last = batch
        counts, size = block_starts.diff(), caches[0].shape[1]
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for req, count in enumerate(counts.tolist()):
            first = int(block_starts[req])
            table[req, :count] = blocks[first : first + count]
        lens = ((counts - 1) * size + last).int()
        scale = self.named.get("sm_scale", q.shape[-1] ** -0.5)
        options = AttentionOptions(causal=causal)
        batch = {"table": table, "lens": lens, "options": options}
        key, value = caches
        return attend(q, key, value, scale, starts, **batch)[0]

    def run(self, *tensors: Any, causal_p: bool = False, out: Any = None) -> Any:
        if out is None:
            prefills, pages, decodes, _ = tensors
            return (
                self.part(prefills, pages, self.given[:4], causal_p),
                self.part(decodes, pages, self.given[4:], False),
            )
        query, keys = torch.cat(tensors[:2], -1), torch.cat(tensors[2:], -1)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        starts, block_starts, blocks, lens = (self.named[name] for name in names)
        size = self.named["page_size"]
        batch = (starts, block_starts, blocks, (lens - 1) % size + 1)
        caches = (keys[:, :, None], keys[:, :, None, : self.named["head_dim_ckv"]])
        return out.copy_(self.part(query, caches, batch, self.named["causal"]))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (FlashInfer, "mla-decode-16h-256x1k"),
        (FlashInfer, "mla-verify-q2-128h-64x4k"),
        (FlashInferPOD, "mixed-128x4k+2k"),
    ],
)
def test_flashinfer_gets_latents_and_mixed_batches(
    monkeypatch: Any, kind: type[FlashInfer], name: str
) -> None:
    module = SimpleNamespace(
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper),
        BatchPODWithPagedKVCacheWrapper=Wrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    inputs = draw_inputs(small(name), 0, "cpu")
    prepared = kind("cpu").prepare(inputs)
    result = prepared.call()
    found = find_expected(inputs).check(prepared.rows(result), torch.bfloat16)
    assert found.ok, found.message
    result.fill_(torch.nan)  # as the benchmark poisons a captured output
    assert prepared.rows(result).isnan().all()


def test_flashinfer_pod_is_for_mixed_batches() -> None:
    with pytest.raises(Declined, match="for mixed batches"):
        FlashInferPOD("cpu").prepare(draw_inputs(small("decode-16x512"), 0, "cpu"))
