"""FlashInfer: its wrappers for pages, ragged keys, latents and mixed batches, planned in advance.

A wrapper plans a batch once and runs it many times. It takes the concatenated block ids of all
requests instead of a table. It compiles its kernels at first use, which takes minutes if they are
not in its cache. The names are those of 0.7.2.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

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
        supported = {"a soft cap", "a latent cache", "values smaller than keys"}
        decline_features(workload, supported)
        library, workspace = _library_and_workspace(inputs)
        if workload.kind == "latent":
            return self._latent(library, workspace, inputs)
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
        if workload.value_size != workload.head_size:
            options["head_dim_vo"] = workload.value_size
        blocks = _flat_blocks(inputs)
        if inputs.max_query_len == 1 and "head_dim_vo" not in options:
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

    @staticmethod
    def _latent(library: Any, workspace: Tensor, inputs: Inputs) -> Prepared:
        """Return a latent decode, which takes latents and rope elements apart."""
        workload, out = inputs.workload, inputs.fresh()
        if workload.is_quantised:
            raise Declined("its kernel for latents does not support an FP8 cache here")
        rank = workload.value_size
        starts, blocks, _ = _flat_blocks(inputs)
        wrapper = library.mla.BatchMLAPagedAttentionWrapper(workspace)
        wrapper.plan(
            qo_indptr=inputs.query_start_loc,
            kv_indptr=starts,
            kv_indices=blocks,
            kv_len_arr=inputs.seq_lens,
            num_heads=workload.query_heads,
            head_dim_ckv=rank,
            head_dim_kpe=workload.head_size - rank,
            page_size=workload.block_size,
            causal=workload.causal,
            sm_scale=workload.scale,
            q_data_type=workload.dtype,
            kv_data_type=workload.kv_dtype,
        )
        query, latents = inputs.query, inputs.key_cache[:, :, 0]
        queries = query[..., :rank].contiguous(), query[..., rank:].contiguous()
        caches = latents[..., :rank], latents[..., rank:]
        return Prepared(
            lambda: wrapper.run(*queries, *caches, out=out),
            note="plan prepared in advance; query split",
        )


class FlashInferPOD(FlashInfer):
    """FlashInfer's wrapper that runs decodes and prefills in one kernel, for mixed batches."""

    name, title = "flashinfer-pod", "FlashInfer POD"

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind != "mixed":
            raise Declined("its kernel is for mixed batches")
        decline_features(workload)
        if workload.is_quantised:
            raise Declined("its kernel does not support an FP8 cache here")
        decodes = workload.query_lens.count(1)
        if set(workload.query_lens[:decodes]) != {1}:
            raise Declined("the decodes are not the first requests of the batch")
        library, workspace = _library_and_workspace(inputs)
        wrapper = library.BatchPODWithPagedKVCacheWrapper(workspace, "NHD")
        reqs, starts = len(workload.kv_lens), inputs.query_start_loc
        window = workload.sliding_window
        wrapper.plan(
            starts[decodes:] - decodes,
            *_flat_blocks(inputs, range(decodes, reqs)),
            starts[: decodes + 1],
            *_flat_blocks(inputs, range(decodes)),
            num_qo_heads=workload.query_heads,
            num_kv_heads=workload.kv_heads,
            head_dim=workload.head_size,
            page_size=workload.block_size,
            window_left=-1 if window is None else window - 1,
            q_data_type=workload.dtype,
            kv_data_type=workload.kv_dtype,
        )
        caches = (inputs.key_cache, inputs.value_cache)
        # two tensors of one storage, as a model has them
        first, rest = inputs.query[:decodes], inputs.query[decodes:]
        return Prepared(
            lambda: TwoOutputs(
                *wrapper.run(rest, caches, first, caches, causal_p=workload.causal)
            ),
            rows=lambda outputs: torch.cat([outputs.decodes, outputs.prefills]),
            note="plan prepared in advance; two outputs",
        )


class TwoOutputs(NamedTuple):
    """The two outputs of one call."""

    prefills: Tensor
    decodes: Tensor

    def fill_(self, value: float) -> None:
        """Fill both with a value."""
        self.prefills.fill_(value)
        self.decodes.fill_(value)


def _library_and_workspace(inputs: Inputs) -> tuple[Any, Tensor]:
    """Return FlashInfer's module, and memory for a wrapper."""
    library = importlib.import_module("flashinfer")
    size, device = WORKSPACE_BYTES, inputs.device
    return library, torch.empty(size, dtype=torch.uint8, device=device)


def _flat_blocks(
    inputs: Inputs, reqs: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts of the requests' blocks, all block ids, and tokens in each last block.

    Args:
        inputs: The tensors of a workload.
        reqs: Optional. The requests. If None, all.
    """
    size, lens = inputs.workload.block_size, inputs.workload.kv_lens
    chosen = range(len(lens)) if reqs is None else reqs
    counts = [-(-lens[req] // size) for req in chosen]
    blocks = torch.cat(
        [
            inputs.block_table[req, :count]
            for req, count in zip(chosen, counts, strict=True)
        ]
    )
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(inputs.device)
    last = torch.tensor([(lens[req] - 1) % size + 1 for req in chosen])
    return starts, blocks, last.int().to(inputs.device)
