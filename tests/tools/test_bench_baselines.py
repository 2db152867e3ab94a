"""Calls of cuDNN's graphs and of FlashInfer's wrappers, which the reference computes."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_reference import attend
from bench_runs import small
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.tools.bench.accuracy import find_expected
from pagetwin.tools.bench.inputs import draw_inputs
from pagetwin.tools.bench.libraries import cudnn_paged
from pagetwin.tools.bench.libraries.cudnn_paged import CudnnPaged
from pagetwin.tools.bench.libraries.flashinfer import FlashInfer, FlashInferPOD
from pagetwin.tools.bench.libraries.library import Declined
from pagetwin.tools.bench.tables import versioned_name

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the calls are those of a run without a GPU"
)


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


def test_a_ratio_names_the_version_of_its_baseline() -> None:
    versions = {"fa4": "operators of vLLM 0.33.0", "cudnn": "9.19.0", "torch": None}
    record = {
        "implementations": {name: {"version": text} for name, text in versions.items()}
        | {"xformers": {}}
    }
    assert versioned_name(record, "fa4") == "fa4, vLLM 0.33.0"
    assert versioned_name(record, "cudnn") == "cudnn, 9.19.0"
    # an older record keeps no versions, and some libraries have none
    assert versioned_name(record, "torch") == "torch"
    assert versioned_name(record, "xformers") == "xformers"
    assert versioned_name(record, None) == ""
