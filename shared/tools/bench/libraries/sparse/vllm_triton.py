"""vLLM: Triton kernels that attend to selected latents, and one of an indexer's scores.

Its decode kernel takes pages of any size, so of one slot too. The kernel of sparse MLA was written
for Intel's GPUs and the indexer's for AMD's; both compile for others.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ...inputs import Inputs
from ...sparse.inputs import IndexInputs, SparseInputs
from ..library import (
    BLOCKS_OF_ONE,
    AttentionLibrary,
    Declined,
    Prepared,
    why_no_modules,
)

OPS = "vllm.v1.attention.ops"
DECODE = f"{OPS}.triton_decode_attention"
SPARSE = f"{OPS}.xpu_mla_sparse"
INDEXER = f"{OPS}.rocm_aiter_mla_sparse"
WORKSPACE = "vllm.v1.worker.workspace"
KEYS_PER_SPLIT = 512
"""Its MLA backend splits the keys of a decode into so many, rounded to a power of two."""
RANK = 512


class VLLMKernels(AttentionLibrary):
    """One of vLLM's modules of Triton kernels."""

    package = "vllm"
    modules: tuple[str, ...]

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        return why_no_modules(*self.modules, install="vllm")

    def prepare(self, inputs: Inputs) -> Prepared:
        raise Declined("it is timed with selected keys only")


class VLLMDecode(VLLMKernels):
    """vLLM's `decode_attention_fwd` over blocks of one slot."""

    name, title, modules = "vllm-decode", "vLLM Triton decode", (DECODE,)

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        paged = inputs.paged
        workload, out = paged.workload, paged.fresh()
        attend: Any = importlib.import_module(DECODE).decode_attention_fwd
        most = max(1, paged.max_seq_len // KEYS_PER_SPLIT)
        splits = 1 << (most - 1).bit_length()
        rows = (workload.tokens, workload.query_heads)
        parts = torch.empty(
            *rows, splits, workload.value_size + 1, device=inputs.device
        )
        lse = torch.empty(rows, device=inputs.device)

        def call() -> Tensor:
            attend(
                paged.query,
                paged.key_cache,
                paged.value_cache,
                out,
                lse,
                paged.block_table,
                paged.seq_lens,
                parts,
                splits,
                workload.scale,
                1,
                is_mla=workload.shares_values,
            )
            return out

        return Prepared(call, note=BLOCKS_OF_ONE)


class VLLMSparse(VLLMKernels):
    """vLLM's `triton_bf16_mla_sparse_interface`."""

    name, title, modules = "vllm-sparse", "vLLM Triton sparse MLA", (SPARSE,)

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        workload = inputs.workload
        if not workload.shares_values or workload.value_size != RANK:
            raise Declined(f"it takes latents with values of {RANK} elements only")
        if inputs.key_cache.numel() >= 2**31:
            raise Declined("its offsets in the cache have 32 bits")
        attend: Any = importlib.import_module(SPARSE).triton_bf16_mla_sparse_interface
        latents, slots = inputs.key_cache.flatten(0, 1), inputs.slots[:, None]

        def call() -> Tensor:
            found: Tensor = attend(inputs.query, latents, slots, workload.scale, RANK)[
                0
            ]
            return found

        return Prepared(call, note="a kernel for Intel's GPUs")


class VLLMIndexer(VLLMKernels):
    """vLLM's `rocm_fp8_paged_mqa_logits_triton`: the indexer's scores of decodes."""

    name, title, modules = "vllm-indexer", "vLLM Triton indexer", (INDEXER, WORKSPACE)

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        raise Declined("it computes no attention")

    def prepare_scores(self, inputs: IndexInputs) -> Prepared:
        workload = inputs.workload
        if set(workload.query_lens) != {1}:
            raise Declined("it takes one token of each request here")
        score: Any = importlib.import_module(INDEXER).rocm_fp8_paged_mqa_logits_triton
        workspace: Any = importlib.import_module(WORKSPACE)
        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(inputs.query.device)
        cache, query = inputs.kv_cache[:, :, None], inputs.query[:, None]

        def call() -> Tensor:
            found: Tensor = score(
                query,
                cache,
                inputs.weights,
                inputs.seq_lens,
                inputs.block_table,
                inputs.max_seq_len,
            )
            return found

        return Prepared(
            call,
            rows=lambda scores: scores[:, None],
            note="a kernel for AMD's GPUs; products of FP8",
            rounds_more=True,
        )
