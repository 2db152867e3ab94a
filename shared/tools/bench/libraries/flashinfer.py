"""FlashInfer: its paged and ragged wrappers, planned in advance.

A wrapper plans a batch once and runs it many times. It takes the concatenated block ids of all
requests instead of a table. It compiles its kernels at first use, which takes minutes if they are
not in its cache.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from .library import (
    AttentionLibrary,
    Declined,
    Prepared,
    decline_features,
    why_no_modules,
)

WORKSPACE_BYTES = 256 << 20


class FlashInfer(AttentionLibrary):
    """FlashInfer's wrappers: decodes on tensor cores, everything else as prefill."""

    name, title, package = "flashinfer", "FlashInfer", "flashinfer-python"

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        return why_no_modules("flashinfer", install="flashinfer-python")

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind == "write":
            raise Declined("it appends by request and position, not by slots")
        decline_features(workload, {"a soft cap"})
        library: Any = importlib.import_module("flashinfer")
        workspace = torch.empty(
            WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device
        )
        out = inputs.fresh()
        heads = (workload.query_heads, workload.kv_heads, workload.head_size)
        dtypes = {"q_data_type": workload.dtype, "kv_data_type": workload.kv_dtype}
        if workload.kind == "encoder":
            wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
            starts = inputs.query_start_loc
            wrapper.plan(starts, starts, *heads, causal=False, **dtypes)
            return Prepared(
                lambda: wrapper.run(inputs.query, inputs.key, inputs.value, out=out),
                note="plan prepared in advance",
            )
        window = workload.sliding_window
        options = {
            "logits_soft_cap": workload.logits_soft_cap or 0.0,
            "window_left": -1 if window is None else window - 1,
            **dtypes,
        }
        sizes = (*heads, workload.block_size)
        blocks = _flat_blocks(inputs)
        if inputs.max_query_len == 1:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True
            )
            wrapper.plan(*blocks, *sizes, **options)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            starts = inputs.query_start_loc
            wrapper.plan(starts, *blocks, *sizes, causal=workload.causal, **options)
        caches = (inputs.key_cache, inputs.value_cache)
        return Prepared(
            lambda: wrapper.run(inputs.query, caches, out=out),
            note="plan prepared in advance",
        )


def _flat_blocks(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts of each request's blocks, all block ids, and tokens in each last block."""
    workload = inputs.workload
    size = workload.block_size
    counts = [-(-kv // size) for kv in workload.kv_lens]
    blocks = torch.cat(
        [row[:count] for row, count in zip(inputs.block_table, counts, strict=True)]
    )
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(inputs.device)
    last = torch.tensor([(kv - 1) % size + 1 for kv in workload.kv_lens])
    return starts, blocks, last.int().to(inputs.device)
