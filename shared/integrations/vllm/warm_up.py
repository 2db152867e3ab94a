"""Warm-up inside vLLM: kernels are compiled in the engine's dummy run, before traffic."""

import importlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import head_size_of
from .context_parallel import LayerKind
from .versions import installed_interface

logger = logging.getLogger(__name__)

_LOCK = Lock()
_WARMED: set[tuple[Any, ...]] = set()
"""Kinds of layers that were warmed up in this process: a few entries per model."""


@dataclass(frozen=True)
class StepBounds:
    """Upper bounds of the engine's steps.

    Args:
        max_num_reqs: requests of a step.
        max_query_len: new tokens of a request in one step.
        max_seq_len: keys of a request.
        decode_query_len: new tokens of a decode: one, and one per speculative token.
        has_cascades: whether vLLM may ask for a prefix that all requests share to be read once.
    """

    max_num_reqs: int
    max_query_len: int
    max_seq_len: int
    decode_query_len: int = 1
    has_cascades: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> "StepBounds":
        """Return the bounds that vLLM's configuration gives."""
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        speculative = getattr(vllm_config, "speculative_config", None)
        drafts = getattr(speculative, "num_speculative_tokens", None) or 0
        max_seq_len = int(model.max_model_len)
        cache = getattr(vllm_config, "cache_config", None)
        has_cascades = (
            installed_interface().has_cascade
            and not getattr(model, "disable_cascade_attn", True)
            and bool(getattr(cache, "enable_prefix_caching", False))
        )
        return cls(
            max_num_reqs=int(scheduler.max_num_seqs),
            max_query_len=min(int(scheduler.max_num_batched_tokens), max_seq_len),
            max_seq_len=max_seq_len,
            decode_query_len=1 + int(drafts),
            has_cascades=has_cascades,
        )


def warm_up_layers(
    implementation: str,
    caches: tuple[Tensor, Tensor],
    num_query_heads: int,
    dtype: torch.dtype,
    options: Sequence[AttentionOptions],
    bounds: StepBounds,
    shared: LayerKind | None = None,
    lse: bool = False,
    cascades: bool = False,
    cache_format: str | None = None,
    scale: float | None = None,
) -> int:
    """Compile the kernels of layers that differ in options, once per process and kind of layer.

    Args:
        implementation: name of the twin. Only one with a function `warm_up` compiles, and with
            `warm_up_ranks` if ranks share the keys.
        caches: the key and value cache of one layer, as its calls pass them.
        num_query_heads: query heads of a layer.
        dtype: dtype of queries and outputs.
        options: options of the calls of each layer.
        bounds: upper bounds of the steps.
        shared: Optional. What layers of this kind share, if ranks share their keys. If None, they
            do not.
        lse: whether the calls have a log-sum-exp.
        cascades: whether a prefix that all requests share is read once.
        cache_format: Optional. Name of a format whose scales are measured. If None, that of the
            caches.
        scale: Optional. That of the calls. If None, 1 / sqrt(head size).

    Returns:
        how many kernels there are.
    """
    key, value = caches
    of_all = (
        *(key.shape[1:], key.stride(), key.dtype, value.shape[1:], value.stride()),
        *(key.device, num_query_heads, dtype, bounds),
        *(None if shared is None else id(shared), lse, cascades, cache_format),
        scale,
    )
    new = []
    with _LOCK:
        for option in options:
            numbers = (option.sliding_window, option.logits_soft_cap, option.causal)
            kind = (*of_all, *option.given, str(numbers))
            if kind not in _WARMED:
                _WARMED.add(kind)
                new.append(option)
    if not new:
        return 0
    top = importlib.import_module(
        f"pagetwin.{implementation}" if "." not in implementation else implementation
    )
    if not hasattr(top, "warm_up" if shared is None else "warm_up_ranks"):
        return 0
    start = time.perf_counter()
    before = _allocated(key.device)
    spec = top.WarmUpSpec(
        key_cache=key,
        value_cache=value,
        num_query_heads=num_query_heads,
        max_num_reqs=bounds.max_num_reqs,
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        dtype=dtype,
        options=tuple(new),
        lse=(lse,),
        scale=scale,
        cascades=cascades,
        **({} if cache_format is None else {"kv_cache_dtype": cache_format}),
    )
    kernels = (
        top.warm_up(spec)
        if shared is None
        else _warm_up_shared(top, spec, shared, bounds)
    )
    logger.info(
        "warm-up: %d kernels of layers with %d query heads, head size %d and %s in %.1f s;"
        " workspace %.1f MiB",
        len(kernels),
        num_query_heads,
        head_size_of(key),
        key.dtype,
        time.perf_counter() - start,
        (_allocated(key.device) - before) / 2**20,
    )
    return len(kernels)


def _warm_up_shared(
    top: Any, spec: Any, shared: LayerKind, bounds: StepBounds
) -> list[Any]:
    """Compile the kernels of steps whose keys ranks share. Nothing is exchanged."""
    spec = replace(spec, out_dtype=torch.float32)
    # in a step of decodes each new token is a request
    tokens = bounds.max_num_reqs * bounds.decode_query_len
    of_ranks = replace(spec, max_num_reqs=tokens, lse=(False, True))
    key, value = shared.new_caches
    of_new_keys = replace(
        spec,
        key_cache=key,
        value_cache=value,
        lse=(True,),
        options=tuple(replace(option, **shared.new_scales) for option in spec.options),
    )
    lses = shared.lses[..., :1]
    top.merge_attn_states(shared.context[:1], lses[0], shared.new[:1], lses[1])
    return [*top.warm_up_ranks(shared.step, of_ranks), *top.warm_up(of_new_keys)]


def can_compile(kv_cache: Tensor) -> bool:
    """Return whether the cache is allocated and no CUDA graph is being captured."""
    if not kv_cache.numel():
        return False
    return not (kv_cache.is_cuda and torch.cuda.is_current_stream_capturing())


def _allocated(device: torch.device) -> int:
    """Return the bytes that torch's allocator has given out on a device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
