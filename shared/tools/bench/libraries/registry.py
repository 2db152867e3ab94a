"""Registry: every attention library that the benchmark can call, ours first."""

from .flash_attention_3 import FlashAttention3
from .flashinfer import FlashInfer
from .library import AttentionLibrary
from .ours import Ours
from .torch_sdpa import TorchAttention
from .vllm_triton import VLLMTriton
from .xformers_split_k import XFormers


def all_libraries(device: str, fa3: str | None = None) -> list[AttentionLibrary]:
    """Return all libraries, installed or not, ours first.

    Args:
        device: "cuda" or "cpu".
        fa3: Optional. The file with FlashAttention-3's operators, as vLLM ships it. If None, an
            installed package is used.
    """
    return [
        Ours(device),
        FlashAttention3(device, fa3),
        FlashInfer(device),
        VLLMTriton(device),
        XFormers(device),
        TorchAttention(device, "FLASH_ATTENTION", "torch-flash", "torch, flash"),
        TorchAttention(device, "CUDNN_ATTENTION", "torch-cudnn", "torch, cuDNN"),
    ]


def choose_libraries(
    libraries: list[AttentionLibrary], names: list[str]
) -> list[AttentionLibrary]:
    """Return the libraries with these names. Ours is always included.

    Args:
        libraries: All libraries.
        names: Names of libraries. "torch" means both of torch's. If empty, all are returned.

    Raises:
        ValueError: No library has one of the names.
    """
    known = [each.name for each in libraries]
    chosen = {"ours"}
    for name in names:
        found = [each for each in known if each == name or each.startswith(f"{name}-")]
        if not found:
            raise ValueError(
                f"implementations = {name!r}: expected some of {', '.join(known)}, torch"
            )
        chosen.update(found)
    return [each for each in libraries if not names or each.name in chosen]
