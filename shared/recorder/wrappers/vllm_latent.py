"""Latent attention (MLA) of vLLM, recorded: cache writes, and the attention of decodes.

A layer of latent attention has no `forward` that writes and attends. vLLM calls
`do_kv_cache_update` with the new latents and rope keys, which share one row of the cache, and
`forward_mqa` with the decodes, which come first in the batch. In between it is paged attention with
one KV head: the key is the whole row, and the value is the row's latent.

Not compared: prefills (`forward_mha` expands the latents in a prefill backend), FP8 queries, caches
that are not plain, and the attention of vLLM's own kernels over an FP8 cache. TRITON_MLA, for
instance, rounds the dequantised keys to the query's dtype: in bfloat16 that alone uses nearly the
whole error budget. Not recorded at all: ranks that share the latents, microbatches, and caches
whose rows are not one per token. Sparse latent attention is wrapped in `vllm_sparse.py`.
"""

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import CACHE_DTYPE_NAMES, TENSOR_SCALE_DTYPES
from ..recorder import Recorder
from .backend import StepGroups
from .vllm_schedule import LATENT_SPEC
from .vllm_step import OWN_NAMES, PLAIN_DTYPES, VllmStepReader

PLAIN_LATENTS = (
    *("CPU_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA"),
    *("TOKENSPEED_MLA", "TRITON_MLA"),
    *OWN_NAMES,
)
"""Backends whose caches hold a latent, and then its rope key, element by element."""
ARGUMENTS = {
    "do_kv_cache_update": (
        *("self", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping"),
        *("kv_cache_dtype", "k_scale"),
    ),
    "forward_mqa": ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
}
"""The arguments of the methods that are wrapped. Versions may have more of them, at the end."""
NAMES = ("latent", "rope key")


def why_left_alone(backend: Any) -> str:
    """Return why a backend of latent attention is not recorded; empty if it is."""
    impl = backend.get_impl_cls()
    for name, expected in ARGUMENTS.items():
        method = getattr(impl, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)
        if found[: len(expected)] != expected:
            return f"its {name} has other arguments"
    return ""


class LatentReader(VllmStepReader):
    """Reads vLLM's metadata of latent attention."""

    specs = (LATENT_SPEC,)

    def why_left_alone(self, builder: Any, layer_names: Sequence[str]) -> str:
        """Return why a builder's steps are not read, and give its layers their names."""
        config = getattr(builder, "vllm_config", None)
        compiled = getattr(config, "compilation_config", None)
        layers = getattr(compiled, "static_forward_context", {})
        for name in layer_names:
            impl: Any = getattr(layers.get(name), "impl", None)
            if hasattr(impl, "recorded_name"):
                impl.recorded_name = name
        reason = _why_not_plain(builder.kv_cache_spec)
        return reason or super().why_left_alone(builder, layer_names)

    def tells(self, recorder: Recorder) -> bool:
        """Return whether the recorder is told of a call now. It is not told of dummy runs."""
        if not recorder.wants_layers or torch.compiler.is_compiling():
            return False
        return self._steps.is_step or recorder.is_capturing

    def tell_write(
        self,
        recorder: Recorder,
        name: str,
        group: str | None,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Tell the recorder what a layer has written, if the format of its cache is known.

        Args:
            recorder: is told.
            name: name of the layer.
            group: Optional. The layers that share its metadata. If None, nothing is told.
            kv_c: [tokens, kv_lora_rank].
            k_pe: [tokens, 1, qk_rope_head_dim].
            kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim].
            cache_dtype: vLLM's name of its dtype.
            k_scale: scale of an FP8 cache.
        """
        if group is None or not kv_cache.numel() or cache_dtype not in PLAIN_DTYPES:
            return
        _, latents, rope_keys = latent_parts(kv_cache, kv_c.shape[-1], cache_dtype)
        is_fp8 = cache_dtype in CACHE_DTYPE_NAMES
        recorder.wrote(
            name,
            kv_c[:, None],
            k_pe.reshape(k_pe.shape[0], 1, k_pe.shape[-1]),
            latents,
            rope_keys,
            {"k_scale": k_scale, "v_scale": k_scale} if is_fp8 else {},
            group,
            NAMES,
        )

    def tell_decodes(
        self,
        recorder: Recorder,
        name: str,
        group: str | None,
        impl: Any,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        metadata: Any,
        layer: Any,
        out: Tensor,
    ) -> None:
        """Tell the recorder what a layer has computed for decodes, as in `tell_write`.

        Args:
            recorder, name, group, kv_cache: as in `tell_write`.
            impl: the implementation, which has the scale of the scores.
            q: [tokens, query_heads, latent width], or its latent and its rope part.
            metadata: vLLM's metadata of the step.
            layer: vLLM's layer, which has the scale of an FP8 cache.
            out: [tokens, query_heads, kv_lora_rank].
        """
        query, rope = q if isinstance(q, tuple) else (q, None)
        cache_dtype = impl.kv_cache_dtype
        if group is None or not len(query) or cache_dtype not in PLAIN_DTYPES:
            return
        is_fp8 = cache_dtype in CACHE_DTYPE_NAMES
        is_rounded = is_fp8 and recorder.implementation not in OWN_NAMES
        # of FP8 queries the recorder recomputes no rows, but it watches blocks
        if is_rounded and query.dtype not in TENSOR_SCALE_DTYPES:
            return
        rank = out.shape[-1]
        rows, latents, _ = latent_parts(kv_cache, rank, cache_dtype)
        causal = getattr(metadata, "causal", True)
        options = AttentionOptions(causal=None if causal is True else causal)
        if is_fp8:
            scale = layer._k_scale
            options = replace(options, k_scale=scale, v_scale=scale)
        recorder.attended(
            name,
            query,
            out.view(*query.shape[:2], rank),
            rows,
            latents,
            impl.scale,
            options,
            group,
            query_rope=rope,
        )


def _why_not_plain(spec: Any) -> str:
    """Return why a cache does not have a latent and a rope key per token; empty if it does."""
    if type(spec).__name__ != LATENT_SPEC:
        return f"its cache is described by {type(spec).__name__}, not by {LATENT_SPEC}"
    # the names in 0.25.1 and in 0.32.0
    for name in ("compress_ratio", "tokens_per_state"):
        if getattr(spec, name, 1) != 1:
            return f"{name} = {getattr(spec, name)}, so a row is not one token"
    return ""


def latent_parts(kv_cache: Tensor, rank: int, cache_dtype: str) -> tuple[Tensor, ...]:
    """Return views of the whole rows of a cache, of their latents, and of their rope keys.

    Args:
        kv_cache: [num_blocks, block_size, latent width].
        rank: elements of a latent.
        cache_dtype: vLLM's name of the dtype. FP8 caches are allocated as uint8.

    Returns:
        [num_blocks, block_size, 1, elements] each.
    """
    if kv_cache.dim() != 3 or kv_cache.shape[2] < rank:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected [num_blocks, block_size,"
            f" latent width], of at least {rank} elements"
        )
    fp8 = CACHE_DTYPE_NAMES.get(cache_dtype)
    rows = kv_cache if fp8 in (None, kv_cache.dtype) else kv_cache.view(fp8)
    rows = rows[:, :, None]
    return rows, rows[..., :rank], rows[..., rank:]


_NUMBERS = itertools.count()


def recorded_latent_impl(
    base: Any, recorder: Recorder, reader: LatentReader, groups: StepGroups
) -> Any:
    """Return a subclass of an implementation of latent attention that tells what it does.

    Args:
        base: an `MLAAttentionImpl` of vLLM.
        recorder, reader, groups: of its backend.
    """

    class RecordedLatentImpl(base):  # type: ignore[misc]
        """Tells the recorder what each layer has written, and computed for decodes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # the builder of the layer's metadata knows the layer's own name
            self.recorded_name = f"latent layer {next(_NUMBERS)}"

        def do_kv_cache_update(
            self,
            kv_c_normed: Tensor,
            k_pe: Tensor,
            kv_cache: Tensor,
            slot_mapping: Tensor,
            kv_cache_dtype: str,
            k_scale: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            given = (kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
            result = super().do_kv_cache_update(*given, *args, **kwargs)
            if reader.tells(recorder):
                name, write = self.recorded_name, (*given[:3], *given[4:])
                recorder.own(
                    lambda: reader.tell_write(
                        recorder, name, groups.of_layer(name), *write
                    )
                )
            return result

        def forward_mqa(
            self,
            q: Any,
            kv_c_and_k_pe_cache: Tensor,
            attn_metadata: Any,
            layer: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            given = (q, kv_c_and_k_pe_cache, attn_metadata, layer)
            result = super().forward_mqa(*given, *args, **kwargs)
            if reader.tells(recorder):
                name = self.recorded_name
                recorder.own(
                    lambda: reader.tell_decodes(
                        recorder, name, groups.find(attn_metadata, name), self, *given,
                        result[0],
                    )
                )  # fmt: skip
            return result

    return RecordedLatentImpl
