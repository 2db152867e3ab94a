"""vLLM: its Triton attention kernel and its Triton cache write, as its backend calls them.

A decode of few requests gets buffers for sixteen segments per request. A cache gets scales whether
it is quantised or not. Since vLLM 0.33 formats with a scale per token and head have modes.
"""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ....contract.cache_formats import CacheFormat
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
        taken_features = {"a soft cap", "sinks", "ALiBi"}
        attend: Any = importlib.import_module(ATTEND).unified_attention
        taken = inspect.signature(attend).parameters
        if "k_scale_cache" in taken:
            taken_features.add("scales per token and head")
        decline_features(workload, taken_features)
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
        note = ""
        if workload.is_quantised and "kv_quant_mode" in taken:
            modes = type(taken["kv_quant_mode"].default)
            given["kv_quant_mode"] = modes.FP8_PER_TENSOR
            if workload.form is not None:
                given["kv_quant_mode"] = find_mode(modes, workload.form)
                given["k_scale_cache"] = inputs.k_scale
                given["v_scale_cache"] = inputs.v_scale
                if workload.form.codes_per_element == 2:
                    note = "rounds rotated queries to 16 bits"
        given = {name: value for name, value in given.items() if name in taken}

        def call() -> Tensor:
            attend(**given)
            return out

        return Prepared(call, note=note, rounds_more=bool(note))

    @staticmethod
    def _write(inputs: Inputs) -> Prepared:
        module: Any = importlib.import_module(WRITE)
        caches = (inputs.key_cache, inputs.value_cache)
        if inputs.workload.form is not None:
            return write_coded(module, inputs, inputs.workload.form)
        write = module.triton_reshape_and_cache_flash
        one = torch.ones(1, device=inputs.device)
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


def find_mode(modes: Any, form: CacheFormat) -> Any:
    """Return vLLM's mode of a format.

    Raises:
        Declined: Its kernels do not have the format.
    """
    mode = getattr(modes, form.name.upper(), None)
    if mode is None or not form.has_token_scales:
        raise Declined(f"its kernels have no {form.name}")
    return mode


def write_coded(module: Any, inputs: Inputs, form: CacheFormat) -> Prepared:
    """Return a write that measures a scale per token and head.

    Raises:
        Declined: The version has no such write, or it writes other codes.
    """
    write = getattr(module, "triton_reshape_and_cache_flash_per_token_head_quant", None)
    if write is None:
        raise Declined(f"its write has no {form.name}")
    if form.codes_per_element == 2:
        raise Declined(
            "it writes other codes of four bits: its levels need not include 0"
        )
    mode = find_mode(module.KVQuantMode, form)
    return Prepared(
        lambda: write(
            inputs.key,
            inputs.value,
            inputs.key_cache,
            inputs.value_cache,
            inputs.k_scale,
            inputs.v_scale,
            inputs.slot_mapping,
            mode,
        ),
        note="its division may be off in the last bits: some codes are next to the nearest",
        rounds_more=True,
    )
