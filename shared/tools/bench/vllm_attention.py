"""How are vLLM's Triton kernels called?

As its own backend calls them: a decode of few requests gets buffers for sixteen parts of each, and
a cache gets scales whether it is quantised or not.
"""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from .implementations import (
    Declined,
    Implementation,
    Prepared,
    has_module,
    library_error,
)
from .inputs import Inputs

ATTEND = "vllm.v1.attention.ops.triton_unified_attention"
WRITE = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
PARTS = 16
LEAST_PROGRAMS = 128
"""Its backend splits the keys of a decode while requests times kv heads are fewer."""


class VLLMTriton(Implementation):
    """vLLM's `unified_attention` and its cache write."""

    name, title, package = "vllm", "vLLM Triton", "vllm"

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        if not has_module("vllm"):
            return "not installed (pip install vllm)"
        try:
            importlib.import_module(ATTEND)
            importlib.import_module(WRITE)
        except Exception as error:  # a broken installation fails in many ways
            return library_error("vllm", error)
        return ""

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind == "write":
            return self._write(inputs)
        if workload.kind == "encoder":
            raise Declined("its kernel reads a cache")
        if not workload.causal and inputs.max_query_len > 1:
            raise Declined("its kernel is causal")
        attend: Any = importlib.import_module(ATTEND).unified_attention
        out, device = inputs.fresh(), inputs.device
        reqs, window = len(workload.kv_lens), workload.sliding_window
        scales = torch.ones(reqs, workload.kv_heads, device=device)
        few = LEAST_PROGRAMS // workload.kv_heads
        parts = (few, workload.query_heads, PARTS)
        given: dict[str, Any] = {
            "q": inputs.query,
            "k": inputs.key_cache,
            "v": inputs.value_cache,
            "out": out,
            "cu_seqlens_q": inputs.query_start_loc,
            "max_seqlen_q": inputs.max_query_len,
            "seqused_k": inputs.seq_lens,
            "max_seqlen_k": inputs.max_seq_len,
            "softmax_scale": workload.head_size**-0.5,
            "causal": True,  # one new token sees all before it either way
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "block_table": inputs.block_table,
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": scales,
            "v_descale": scales,
            "seq_threshold_3D": few,
            "num_par_softmax_segments": PARTS,
            "softmax_segm_output": torch.empty(
                *parts, workload.head_size, device=device
            ),
            "softmax_segm_max": torch.empty(parts, device=device),
            "softmax_segm_expsum": torch.empty(parts, device=device),
        }
        taken = inspect.signature(attend).parameters
        if workload.is_quantised and "kv_quant_mode" in taken:
            modes = type(taken["kv_quant_mode"].default)
            given["kv_quant_mode"] = modes.FP8_PER_TENSOR
        given = {name: value for name, value in given.items() if name in taken}

        def call() -> Tensor:
            attend(**given)
            return out

        return Prepared(call)

    @staticmethod
    def _write(inputs: Inputs) -> Prepared:
        write: Any = importlib.import_module(WRITE).triton_reshape_and_cache_flash
        one = torch.ones(1, device=inputs.device)
        caches = (inputs.key_cache, inputs.value_cache)
        return Prepared(
            lambda: write(
                inputs.key,
                inputs.value,
                *caches,
                inputs.slot_mapping,
                "auto",
                one,
                one,
            )
        )
