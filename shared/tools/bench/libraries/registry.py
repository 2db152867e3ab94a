"""Registry: every attention library that the benchmark can call, ours first."""

from ...bench_names import find_implementations
from .cudnn_paged import CudnnPaged
from .flash_attention_3 import FlashAttention3
from .flash_attention_4 import FlashAttention4
from .flash_mla import FlashMLA
from .flashinfer import FlashInfer, FlashInferPOD
from .library import AttentionLibrary
from .ours import Ours, OursPlain, OursUnquantised
from .sparse.flash_mla import FlashMLARecords, FlashMLASparse
from .sparse.torch_products import TorchScores, TorchTopk
from .sparse.vllm_triton import VLLMDecode, VLLMIndexer, VLLMSparse
from .torch_index import TorchIndex
from .torch_sdpa import TorchAttention
from .vllm_triton import VLLMTriton
from .xformers_split_k import XFormers


def all_libraries(
    device: str,
    fa3: str | None = None,
    flashmla: str | None = None,
    suite: str = "standard",
) -> list[AttentionLibrary]:
    """Return all libraries, installed or not, ours first.

    Args:
        device: "cuda" or "cpu".
        fa3: Optional. The file with FlashAttention-3's operators, as vLLM ships it. If None, an
            installed package is used.
        flashmla: Optional. The same for FlashMLA's operators.
        suite: Suite of workloads. The standard suite has no workload of FlashMLA, and does not
            compare ours with itself. That of sparse attention has libraries of its own.
    """
    if suite == "sparse":
        return _sparse_libraries(device, fa3, flashmla)
    beyond: list[AttentionLibrary] = []
    if suite != "standard":
        beyond = [
            OursPlain(device),
            OursUnquantised(device),
            FlashMLA(device, flashmla),
            TorchIndex(device),
        ]
    return [
        Ours(device),
        FlashAttention3(device, fa3),
        FlashAttention4(device),
        FlashInfer(device),
        FlashInferPOD(device),
        CudnnPaged(device),
        VLLMTriton(device),
        XFormers(device),
        TorchAttention(device, "FLASH_ATTENTION", "torch-flash", "torch, flash"),
        TorchAttention(device, "CUDNN_ATTENTION", "torch-cudnn", "torch, cuDNN"),
        *beyond,
    ]


def _sparse_libraries(
    device: str, fa3: str | None, flashmla: str | None
) -> list[AttentionLibrary]:
    """Return the libraries of sparse attention, of its indexer and of its selection."""
    return [
        Ours(device),
        FlashAttention3(device, fa3),
        FlashMLASparse(device, flashmla),
        FlashMLARecords(device, flashmla),
        FlashInfer(device),
        VLLMTriton(device),
        VLLMDecode(device),
        VLLMSparse(device),
        VLLMIndexer(device),
        TorchAttention(device, "FLASH_ATTENTION", "torch-flash", "torch, flash"),
        TorchTopk(device),
        TorchScores(device),
    ]


def choose_libraries(
    libraries: list[AttentionLibrary], names: list[str]
) -> list[AttentionLibrary]:
    """Return the libraries with these names. Ours and its variants are always included.

    Args:
        libraries: All libraries.
        names: Names of libraries. "torch" means all of torch's, "ours" also the variants of ours
            that are baselines. If empty, all are returned.

    Raises:
        ValueError: No library has one of the names.
    """
    known = [library.name for library in libraries]
    chosen = {name for name in known if name.split("-")[0] == "ours"}
    for name in names:
        chosen.update(find_implementations(name, known))
    return [library for library in libraries if not names or library.name in chosen]
