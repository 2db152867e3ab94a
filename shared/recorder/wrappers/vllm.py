"""The recorder in vLLM: any of its attention backends, recorded, without a change of the engine.

vLLM resolves each backend by a path in its registry, when an engine chooses it. If PAGETWIN_RECORD
is set, `record_vllm_backends` replaces the paths by paths into this module, which gives a recorded
subclass of the same backend.

Layers that are not checked: cross-attention, encoders, chunked local attention, windows beside a
prompt (R-SWA), context parallelism and FP8 outputs. Their steps run as
without a recorder. With an FP8 query the writes are compared, and attention too where it is that of
FlashAttention-3. Of backends whose caches are not in `PLAIN_CACHES` the bookkeeping alone is
checked. Latent attention (MLA) is wrapped in `vllm_latent.py`, that of layers with an indexer in
`vllm_sparse.py`.
"""

import importlib
import inspect
import logging
import os
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import (
    CACHE_DTYPE_NAMES,
    TENSOR_SCALE_DTYPES,
    split_layer_cache,
)
from ...contract.extras import require
from ...contract.kinds import AttentionType
from ...contract.layer_pages import measured_format, split_scaled_cache
from ...validation.impl import read_global_scales
from ..environment import recorder_from_environment
from ..settings import RECORD_VARIABLE
from .backend import record_backend
from .readers import LayerView
from .vllm_latent import (
    PLAIN_LATENTS,
    LatentReader,
    recorded_latent_impl,
    why_left_alone,
)
from .vllm_schedule import KEY_VALUE_SPECS, STEPS
from .vllm_sparse import PLAIN_SPARSE, SparseReader, recorded_sparse_impl
from .vllm_step import OWN_NAMES, PLAIN_DTYPES, VllmStepReader

LOGGER = logging.getLogger("pagetwin.recorder")
REGISTRY = "vllm.v1.attention.backends.registry"
FORWARD = ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata"]
PLAIN_CACHES = (
    *("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"),
    *OWN_NAMES,
)
"""Backends whose caches hold a key, and then its value, element by element. Others reorder or
quantise them: CPU_ATTN, for instance, in the order of its matrix instructions."""
FLASH_ATTENTION_3 = 3


class VllmReader(VllmStepReader):
    """Reads vLLM's metadata, caches and implementations of keys and values."""

    specs = KEY_VALUE_SPECS

    def layer(
        self, impl: Any, layer: Any, kv_cache: Tensor, metadata: Any, query: Tensor
    ) -> LayerView | None:
        """Return what is read of a call; None if it is not checked."""
        # pagetwin's own implementation holds the arguments in its layer
        is_own, impl = hasattr(impl, "own"), getattr(impl, "own", impl)
        kind = getattr(impl, "attn_type", AttentionType.DECODER.value)
        kind = getattr(kind, "value", kind)
        if kind != AttentionType.DECODER.value or not kv_cache.numel():
            return None
        if _has_other_masks(impl, metadata):
            return None
        name = impl.kv_cache_dtype
        # it writes and reads stored scales as the reference does; vLLM's kernels round otherwise
        form = measured_format(name) if is_own else None
        if form is None and name not in PLAIN_DTYPES:
            return None
        scales: dict[str, Any] = {}
        if form is not None:
            size = impl.head_size
            key, value, k_scale, v_scale = split_scaled_cache(kv_cache, size, form)
            scales = {"k_scale": k_scale, "v_scale": v_scale}
            scales |= read_global_scales(layer, form)
        else:
            key, value = split_layer_cache(kv_cache, impl.head_size, name)
        if name in CACHE_DTYPE_NAMES:
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        is_known = query.dtype in TENSOR_SCALE_DTYPES and _scales_fp8_weights(impl)
        options = AttentionOptions(
            causal=_causal(metadata),
            sliding_window=_window(impl.sliding_window),
            logits_soft_cap=impl.logits_soft_cap or None,
            alibi_slopes=_per_head(impl, "alibi_slopes", query),
            sinks=_per_head(impl, "sinks", query),
            **scales,
        )
        return LayerView(
            key,
            value,
            scales,
            impl.scale,
            options,
            getattr(impl, "kv_sharing_target_layer_name", None) is None,
            metadata.num_actual_tokens,
            layer._q_scale if is_known else None,
            None if form is None else form.name,
        )


_PATHS: dict[str, str] = {}
"""The path of each backend before it was replaced, by the name of its member."""

_RECORDED: dict[tuple[str, Any], Any] = {}
"""The recorded class of each backend, by the name of its member and the backend itself. One path
may give several backends: that of pagetwin's plugin has another class for latent attention."""


def record_vllm_backends() -> None:
    """Let vLLM resolve recorded backends if PAGETWIN_RECORD is set. May be called several times.

    Raises:
        ImportError: vLLM is not installed.
    """
    if not os.environ.get(RECORD_VARIABLE):
        return
    require(f"{RECORD_VARIABLE} for vLLM", "vllm")
    registry = importlib.import_module(REGISTRY)
    for member in registry.AttentionBackendEnum:
        try:
            path = member.get_path()
        except ValueError:  # no backend is registered under that name
            continue
        if path.startswith(f"{__name__}."):
            continue
        _PATHS[member.name] = path
        registry.register_backend(member, f"{__name__}.{member.name}")


def plain_path(name: str) -> str | None:
    """Return the path that a backend had before it was recorded; None if it is not recorded."""
    return _PATHS.get(name)


def __getattr__(name: str) -> Any:
    # vLLM resolves a path by getattr, and on CUDA the name of the class that it found
    for recorded in _RECORDED.values():
        if (recorded.__module__, recorded.__qualname__) == (__name__, name):
            return recorded
    if name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PATHS[name].rpartition(".")
    backend = getattr(importlib.import_module(module), attribute)
    if (name, backend) not in _RECORDED:
        _RECORDED[name, backend] = _recorded(name, backend)
    return _RECORDED[name, backend]


def _recorded(name: str, backend: Any) -> Any:
    """Return the recorded subclass of a backend; the backend itself if it is not checked."""
    reason = _why_left_alone(backend)
    if reason:
        LOGGER.warning("flight recorder: %s is not recorded: %s", name, reason)
        return backend
    recorder = recorder_from_environment(name, int(name not in OWN_NAMES))
    if recorder is None:
        return backend
    STEPS.watch()
    STEPS.recorders.append(recorder)
    is_sparse = backend.is_mla() and getattr(backend, "is_sparse", bool)()
    plain = PLAIN_LATENTS if backend.is_mla() else PLAIN_CACHES
    is_plain = name in (PLAIN_SPARSE if is_sparse else plain)
    if not is_plain:
        LOGGER.warning(
            "flight recorder: the format of %s's cache is not known: the bookkeeping is checked,"
            " and neither cache writes nor attention",
            name,
        )
    given = (STEPS, is_plain, recorder.settings.vllm_graphs)
    if is_sparse:
        recorded = record_backend(
            backend, recorder, SparseReader(*given), recorded_sparse_impl
        )
    elif backend.is_mla():
        reader = LatentReader(*given)
        recorded = record_backend(backend, recorder, reader, recorded_latent_impl)
    else:
        recorded = record_backend(backend, recorder, VllmReader(*given))
    recorded.__module__ = __name__
    recorded.__qualname__ = f"{recorded.__name__}_{name}"
    return recorded


def _why_left_alone(backend: Any) -> str:
    """Return why a backend is not recorded; empty if it is."""
    if backend.is_mla():
        return why_left_alone(backend)
    names = list(inspect.signature(backend.get_impl_cls().forward).parameters)
    return "" if names[: len(FORWARD)] == FORWARD else "its layers have other arguments"


def _has_other_masks(impl: Any, metadata: Any) -> bool:
    """Return whether a layer has a mask or a bias that `AttentionOptions` does not describe."""
    return (
        bool(getattr(impl, "use_alibi_sqrt", False))
        or getattr(impl, "chunk_lookback", -1) > -1
        or getattr(metadata, "mm_prefix_range", None) is not None
        or getattr(metadata, "rswa_window", None) is not None
    )


def _scales_fp8_weights(impl: Any) -> bool:
    """Return whether softmax weights are rounded to FP8 at 256 times their size.

    FlashAttention-3 does. At their own size, weights below 2^-10 of the largest one become 0, and a
    row with a needle may lose most of the others: no error budget of each weight holds there.
    """
    return getattr(impl, "vllm_flash_attn_version", None) == FLASH_ATTENTION_3


def _causal(metadata: Any) -> bool | Tensor | None:
    causal = getattr(metadata, "causal", True)
    return None if causal is True else causal


def _window(window: Any) -> int | None:
    """Return the keys that a query attends to, from vLLM's (left, right) or a number."""
    left = window[0] if isinstance(window, tuple | list) else window
    if isinstance(window, tuple | list):
        return None if left < 0 else int(left) + 1
    return None if left is None or left <= 0 else int(left)


def _per_head(impl: Any, name: str, query: Tensor) -> Tensor | None:
    """Return one float32 number per query head on the device of the query; None if there is none.

    Numbers of the host are copied once, since a capture must not copy any: its warm-up comes first.
    """
    given = getattr(impl, name, None)
    if given is None:
        return None
    if isinstance(given, Tensor) and given.device == query.device:
        return given.float()
    kept = vars(impl).setdefault("recorded_per_head", {})
    if name not in kept:
        kept[name] = torch.as_tensor(given, dtype=torch.float32, device=query.device)
    copied: Tensor = kept[name]
    return copied
