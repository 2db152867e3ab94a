"""FlashMLA: the dense decode operator in vLLM's wheel, for latent decodes.

The operator is in one file that needs nothing else of vLLM. Its first call computes a schedule,
which later calls of the same batch reuse.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from .library import (
    AttentionLibrary,
    Declined,
    Prepared,
    describe_origin,
    has_module,
    library_error,
)

VARIABLE = "PAGETWIN_FLASHMLA"
BLOCK_SIZE = 64
"""Tokens per block, the only size that it takes."""


class FlashMLA(AttentionLibrary):
    """FlashMLA's dense decode over pages of 64 latents.

    Args:
        device: The device to run on.
        path: Optional. vLLM's `_flashmla_C.abi3.so`. If None, the file that PAGETWIN_FLASHMLA
            names, or that of an installed vLLM.
    """

    name, title = "flashmla", "FlashMLA"
    operator = "dense_decode_fwd"

    def __init__(self, device: str, path: str | None = None) -> None:
        super().__init__(device)
        self.path = path or os.environ.get(VARIABLE) or _installed()
        self._decode: Any = None

    def version(self) -> str | None:
        """Return the origin, because the operators have no version."""
        return None if self.path is None else describe_origin(self.path)

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        if torch.cuda.get_device_capability()[0] != 9:
            return "needs a GPU of compute capability 9"
        if self.path is None:
            return (
                "vLLM's _flashmla_C.abi3.so is not here: name the file with --flashmla or"
                f" {VARIABLE}"
            )
        try:
            libraries: Any = torch.ops
            libraries.load_library(self.path)
            self._decode = getattr(libraries._flashmla_C, self.operator)
        except (OSError, AttributeError, RuntimeError) as error:
            return library_error(self.path, error)
        return ""

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind != "latent":
            raise Declined("it computes latent decodes only")
        if workload.is_quantised:
            raise Declined("its dense operator does not support an FP8 cache")
        if len(set(workload.query_lens)) > 1:
            raise Declined("its requests have the same number of new tokens")
        if self.device != "cpu" and workload.block_size != BLOCK_SIZE:
            raise Declined(f"its blocks have {BLOCK_SIZE} tokens")
        reqs, value_size = len(workload.kv_lens), workload.value_size
        query = inputs.query.view(reqs, -1, *inputs.query.shape[1:])
        batch = (inputs.seq_lens, inputs.block_table, workload.scale, workload.causal)
        plan: list[Tensor | None] = [None, None]
        # older versions have no argument for the output
        rest = [None] * (len(self._decode.default._schema.arguments) - 9)

        def attend() -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = self._decode(
                query, inputs.key_cache, value_size, *batch, *plan, *rest
            )
            return found

        plan[:] = attend()[2:4]
        return Prepared(
            lambda: attend()[0],
            rows=lambda out: out.flatten(0, 1),
            note="schedule prepared in advance",
        )


def _installed() -> str | None:
    """Return the file in an installed vLLM, without importing vLLM."""
    if not has_module("vllm"):
        return None
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        if (path := Path(folder) / "_flashmla_C.abi3.so").is_file():
            return str(path)
    return None
