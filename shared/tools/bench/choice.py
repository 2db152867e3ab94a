"""The implementations that are timed, and the choice among them by name."""

from .flash_attention_3 import FlashAttention3
from .flashinfer_attention import FlashInfer
from .implementations import Implementation, Ours, TorchAttention, XFormers
from .vllm_attention import VLLMTriton


def all_implementations(device: str, fa3: str | None = None) -> list[Implementation]:
    """Return all implementations that are timed, ours first.

    Args:
        device: "cuda" or "cpu".
        fa3: the file of FlashAttention-3's operators, as vLLM ships it; None: as it is
            installed.
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


def choose_implementations(
    everyone: list[Implementation], names: list[str]
) -> list[Implementation]:
    """Return those of these names, ours always among them; "torch" is all of torch's.

    Raises:
        ValueError: a name that none has.
    """
    known = [each.name for each in everyone]
    chosen = {"ours"}
    for name in names:
        found = [each for each in known if each == name or each.startswith(f"{name}-")]
        if not found:
            raise ValueError(
                f"implementations = {name!r}: expected some of {', '.join(known)}, torch"
            )
        chosen.update(found)
    return [each for each in everyone if not names or each.name in chosen]
