"""vLLM: its Triton attention kernel and its Triton cache write, as its backend calls them.

A decode of few requests gets buffers for sixteen segments per request. A cache gets scales whether
it is quantised or not.
"""

import importlib
import inspect
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

ATTEND = "vllm.v1.attention.ops.triton_unified_attention"
WRITE = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
SEGMENTS = 16
LEAST_PROGRAMS = 128
"""Its backend splits the keys of a decode if requests times KV heads are fewer."""


class VLLMTriton(AttentionLibrary):
    """vLLM's `unified_attention` and its cache write."""

    name, title, package = "vllm", "vLLM Triton", "vllm"

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        return why_no_modules(ATTEND, WRITE, install="vllm")

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind == "write":
            return self._write(inputs)
        if workload.kind == "encoder":
            raise Declined("its kernel requires a paged cache")
        if not workload.causal and inputs.max_query_len > 1:
            raise Declined("its kernel supports causal attention only")
        decline_features(workload, {"a soft cap", "sinks", "ALiBi"})
        attend: Any = importlib.import_module(ATTEND).unified_attention
        out, device = inputs.fresh(), inputs.device
        reqs, window = len(workload.kv_lens), workload.sliding_window
        scales = torch.ones(reqs, workload.kv_heads, device=device)
        few = LEAST_PROGRAMS // workload.kv_heads
        segments = (few, workload.query_heads, SEGMENTS)
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
            "causal": True,  # for one new token both settings are the same
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "block_table": inputs.block_table,
            "softcap": workload.logits_soft_cap or 0.0,
            "sinks": inputs.sinks,
            "alibi_slopes": inputs.alibi_slopes,
            "q_descale": None,
            "k_descale": scales,
            "v_descale": scales,
            "seq_threshold_3D": few,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": torch.empty(
                *segments, workload.head_size, device=device
            ),
            "softmax_segm_max": torch.empty(segments, device=device),
            "softmax_segm_expsum": torch.empty(segments, device=device),
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
                "fp8" if inputs.workload.is_quantised else "auto",
                one,
                one,
            )
        )
