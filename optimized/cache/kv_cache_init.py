"""How does every layer of a model get its cache?

This runs once, when the engine starts; there is nothing to make faster.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...contract.layouts import KVCacheLayout, get_kv_cache_layout
from ...contract.shapes import RawCache
from ...contract.specs import KVCacheConfig, KVCacheSpec
from ...engine.backend_interface import AttentionBackend
from ...validation.kv_cache import (
    check_enough_pages,
    check_layers_present,
    check_shared_caches,
    check_whole_pages,
    layer_number,
)
from .kv_cache import view_kv_cache


def get_kv_cache_spec(
    static_forward_context: Mapping[str, Any], block_size: int, dtype: torch.dtype
) -> dict[str, KVCacheSpec]:
    """Return what a block of each layer holds, for the layers that keep a cache."""
    specs = {}
    for name, layer in static_forward_context.items():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        spec = layer.get_kv_cache_spec(block_size, dtype)
        if spec is not None:
            specs[name] = spec
    return specs


def allocate_kv_caches(
    kv_cache_config: KVCacheConfig, device: torch.device | str = "cpu"
) -> dict[str, RawCache]:
    """Return the bytes of each layer's cache, all zero."""
    raw_tensors = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        raw = torch.zeros(tensor.size, dtype=torch.int8, device=device)
        for name in tensor.shared_by:
            raw_tensors[name] = raw
    return raw_tensors


def reshape_kv_caches(
    kv_cache_config: KVCacheConfig,
    kv_cache_raw_tensors: Mapping[str, RawCache],
    attn_backends: Mapping[str, type[AttentionBackend]],
    layout: KVCacheLayout | None = None,
) -> dict[str, Tensor]:
    """Return each layer's bytes seen as its cache; nothing is copied."""
    layout = get_kv_cache_layout(layout)
    kv_caches = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        check_layers_present(
            "kv_cache_raw_tensors", kv_cache_raw_tensors, group.layer_names
        )
        check_layers_present("attn_backends", attn_backends, group.layer_names)
        for name in group.layer_names:
            # step: count the pages
            raw, backend = kv_cache_raw_tensors[name], attn_backends[name]
            num_blocks = check_whole_pages(name, raw, spec.page_size_bytes)
            check_enough_pages(name, num_blocks, kv_cache_config.num_blocks)
            # step: see them as the backend does
            shape = backend.get_kv_cache_shape(
                num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
            )
            order = backend.get_kv_cache_stride_order(layout)
            kv_caches[name] = view_kv_cache(raw, spec.dtype, shape, order)
    return kv_caches


def bind_kv_cache(
    kv_caches: Mapping[str, Tensor], static_forward_context: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Hand each layer its cache, and return the caches in the order of the layers."""
    check_layers_present("static_forward_context", static_forward_context, kv_caches)
    targets = {}
    for name, layer in static_forward_context.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target is not None:
            targets[name] = target
    check_shared_caches(targets, kv_caches)
    # step: order the caches by the number of the layer
    ordered = {name: kv_caches[name] for name in sorted(kv_caches, key=layer_number)}
    # step: hand each layer its cache
    for name, cache in ordered.items():
        static_forward_context[name].kv_cache = cache
    # step: hand the others the caches they share
    for name, target in targets.items():
        static_forward_context[name].kv_cache = ordered[target]
    return ordered


def init_kv_cache(
    static_forward_context: Mapping[str, Any],
    kv_cache_config: KVCacheConfig,
    attn_backends: Mapping[str, type[AttentionBackend]],
    device: torch.device | str = "cpu",
    layout: KVCacheLayout | None = None,
) -> dict[str, Tensor]:
    """Allocate the caches of a model, hand them to its layers and return them."""
    # step: allocate
    raw_tensors = allocate_kv_caches(kv_cache_config, device)
    # step: look at the bytes as caches
    kv_caches = reshape_kv_caches(kv_cache_config, raw_tensors, attn_backends, layout)
    # step: hand them to the layers
    return bind_kv_cache(kv_caches, static_forward_context)
