"""KV caches of a model: allocation, reshaping and binding to layers.

An engine asks the layers for the content of their blocks, measures how many blocks fit in memory,
and writes both into a config. The rest follows from the config: each tensor is allocated once,
each layer gets a view of its bytes in the shape of its backend, and the views are bound to the
layers. Layers with equal pages form a group with one block table. Layers of different groups may
share a tensor, as each of its blocks belongs to one group at a time.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.layouts import KVCacheLayout, get_kv_cache_layout
from ...contract.shapes import RawCache
from ...contract.specs import KVCacheConfig, KVCacheSpec
from ...engine.backend_interface import AttentionBackend
from ...validation.kv_cache import (
    check_enough_pages,
    check_layers_present,
    check_no_padding,
    check_plain_cells,
    check_shared_caches,
    check_whole_pages,
    layer_number,
)
from .kv_cache import view_kv_cache


@typed
def get_kv_cache_spec(
    static_forward_context: Mapping[str, Any], block_size: int, dtype: torch.dtype
) -> dict[str, KVCacheSpec]:
    """Return the content of a block of each layer that has a cache of its own.

    A layer that shares the cache of an earlier layer has none, nor does an encoder layer.

    Args:
        static_forward_context: layers by name. Layers without a method `get_kv_cache_spec` are
            ignored.
        block_size: slots in a block, at least 1.
        dtype: dtype of the caches.

    Returns:
        Specs by layer name, in the order of the layers.

    Raises:
        ValueError: the block size is below 1.

    Source:
        vLLM's function of that name.

    Example:
        >>> layers = {}
        >>> for name, target in (("layers.0", None), ("layers.1", "layers.0")):
        ...     _ = Attention(
        ...         8, 64, 0.125, num_kv_heads=2, prefix=name,
        ...         kv_sharing_target_layer_name=target,
        ...         attn_backend=BACKENDS[0], static_forward_context=layers,
        ...     )
        >>> specs = get_kv_cache_spec(layers, block_size=16, dtype=torch.float16)
        >>> {name: spec.page_size_bytes for name, spec in specs.items()}
        {'layers.0': 8192}
    """
    specs = {}
    for name, layer in static_forward_context.items():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        spec = layer.get_kv_cache_spec(block_size, dtype)
        if spec is not None:
            specs[name] = spec
    return specs


@typed
def allocate_kv_caches(
    kv_cache_config: KVCacheConfig, device: torch.device | str = "cpu"
) -> dict[str, RawCache]:
    """Return the bytes of each layer's cache, all zero.

    Args:
        kv_cache_config: the tensors, and the layers that share them.
        device: device of the caches.

    Returns:
        [bytes] int8 by layer name, in the order of the tensors. Layers that share a tensor have
        the same object.

    Source:
        vLLM's `_allocate_kv_cache`.

    Example:
        >>> spec = KVCacheSpec(16, 2, 8, torch.float16)
        >>> config = KVCacheConfig(
        ...     num_blocks=2,
        ...     kv_cache_tensors=[KVCacheTensor(2048, ["layers.0", "layers.1"])],
        ...     kv_cache_groups=[
        ...         KVCacheGroupSpec(["layers.0"], spec),
        ...         KVCacheGroupSpec(["layers.1"], spec),
        ...     ],
        ... )
        >>> raw = allocate_kv_caches(config)
        >>> raw["layers.0"].shape, raw["layers.0"] is raw["layers.1"]
        (torch.Size([2048]), True)
    """
    raw_tensors = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        raw = torch.zeros(tensor.size, dtype=torch.int8, device=device)
        for name in tensor.shared_by:
            raw_tensors[name] = raw
    return raw_tensors


@typed
def reshape_kv_caches(
    kv_cache_config: KVCacheConfig,
    kv_cache_raw_tensors: Mapping[str, RawCache],
    attn_backends: Mapping[str, type[AttentionBackend]],
    layout: KVCacheLayout | None = None,
) -> dict[str, Tensor]:
    """Return each layer's bytes as its cache; nothing is copied.

    Args:
        kv_cache_config: the groups, and the content of their blocks.
        kv_cache_raw_tensors: [bytes] int8 by layer name, each a whole number of pages.
        attn_backends: backends by layer name. A backend determines the axes of its cache and
            their order in memory.
        layout: Optional. Order of heads and slots. If None, `get_kv_cache_layout` decides.

    Returns:
        Views by layer name, in the order of the groups.

    Raises:
        KeyError: a layer has no bytes or no backend.
        ValueError: the bytes are not a whole number of pages, are too few, or do not match the
            backend's shape, a slot does not hold a key and a value of `head_size` elements, or
            pages are padded.

    Source:
        vLLM's `_reshape_kv_cache`.

    Example:
        >>> spec = KVCacheSpec(16, 2, 8, torch.float16)
        >>> config = KVCacheConfig(
        ...     num_blocks=2,
        ...     kv_cache_tensors=[KVCacheTensor(2048, ["layers.0"])],
        ...     kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)],
        ... )
        >>> kv_caches = reshape_kv_caches(
        ...     config,
        ...     kv_cache_raw_tensors=allocate_kv_caches(config),
        ...     attn_backends={"layers.0": BACKENDS[0]},
        ...     layout=KVCacheLayout.HND,
        ... )
        >>> kv_caches["layers.0"].shape, kv_caches["layers.0"].stride()
        (torch.Size([2, 2, 16, 2, 8]), (512, 256, 8, 128, 1))
    """
    layout = get_kv_cache_layout(layout)
    kv_caches = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        check_plain_cells(spec)
        check_no_padding(spec)
        check_layers_present(
            "kv_cache_raw_tensors", kv_cache_raw_tensors, group.layer_names
        )
        check_layers_present("attn_backends", attn_backends, group.layer_names)
        for name in group.layer_names:
            # step: count the pages
            raw, backend = kv_cache_raw_tensors[name], attn_backends[name]
            num_blocks = check_whole_pages(name, raw, spec.page_size_bytes)
            check_enough_pages(name, num_blocks, kv_cache_config.num_blocks)
            # step: view them in the backend's shape
            shape = backend.get_kv_cache_shape(
                num_blocks, spec.block_size, spec.num_kv_heads, spec.stored_head_size
            )
            order = backend.get_kv_cache_stride_order(layout)
            kv_caches[name] = view_kv_cache(raw, spec.dtype, shape, order)
    return kv_caches


@typed
def bind_kv_cache(
    kv_caches: Mapping[str, Tensor], static_forward_context: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Set the cache of each layer and return the caches in layer order.

    A layer that shares the cache of another layer gets the same tensor.

    Args:
        kv_caches: caches by layer name, which contains the layer's number between dots.
        static_forward_context: layers by name, modified in place: `kv_cache` of each is set.

    Returns:
        The caches by layer name, sorted by number. Layers with the same number, as a decoder's
        self-attention and cross-attention, keep the order of `kv_caches`.

    Raises:
        KeyError: a cache has no layer, or a layer shares a cache that does not exist.
        ValueError: a name has no number, or two.

    Source:
        vLLM's function of that name.

    Example:
        >>> class Layer:
        ...     kv_cache = None
        >>> layers = {"layers.10.attn": Layer(), "layers.9.attn": Layer()}
        >>> caches = {
        ...     "layers.10.attn": torch.zeros(1),
        ...     "layers.9.attn": torch.ones(1),
        ... }
        >>> list(bind_kv_cache(caches, layers))
        ['layers.9.attn', 'layers.10.attn']
        >>> layers["layers.9.attn"].kv_cache
        tensor([1.])
    """
    check_layers_present("static_forward_context", static_forward_context, kv_caches)
    targets = {}
    for name, layer in static_forward_context.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target is not None:
            targets[name] = target
    check_shared_caches(targets, kv_caches)
    # step: sort the caches by layer number
    ordered = {name: kv_caches[name] for name in sorted(kv_caches, key=layer_number)}
    # step: bind each layer's cache
    for name, cache in ordered.items():
        static_forward_context[name].kv_cache = cache
    # step: bind the shared caches to the other layers
    for name, target in targets.items():
        static_forward_context[name].kv_cache = ordered[target]
    return ordered


@typed
def init_kv_cache(
    static_forward_context: Mapping[str, Any],
    kv_cache_config: KVCacheConfig,
    attn_backends: Mapping[str, type[AttentionBackend]],
    device: torch.device | str = "cpu",
    layout: KVCacheLayout | None = None,
) -> dict[str, Tensor]:
    """Allocate the caches of a model, bind them to its layers and return them.

    Args:
        static_forward_context: layers by name, modified in place: `kv_cache` of each is set.
        kv_cache_config: tensors and groups of the caches.
        attn_backends: backends by layer name.
        device: device of the caches.
        layout: Optional. Order of heads and slots. If None, `get_kv_cache_layout` decides.

    Returns:
        The caches by layer name, in layer order, all zero.

    Raises:
        KeyError: an argument has no entry for a layer.
        ValueError: the config does not match its specs or backends.

    Source:
        vLLM's function of that name.

    Example:
        >>> class Layer:
        ...     kv_cache = None
        >>> layers, names = {"layers.0": Layer()}, ["layers.0"]
        >>> spec = KVCacheSpec(16, 2, 8, torch.float16)
        >>> config = KVCacheConfig(
        ...     num_blocks=2,
        ...     kv_cache_tensors=[KVCacheTensor(2048, names)],
        ...     kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        ... )
        >>> kv_caches = init_kv_cache(layers, config, {"layers.0": BACKENDS[0]})
        >>> layers["layers.0"].kv_cache.shape
        torch.Size([2, 2, 16, 2, 8])
    """
    # step: allocate
    raw_tensors = allocate_kv_caches(kv_cache_config, device)
    # step: view the bytes as caches
    kv_caches = reshape_kv_caches(kv_cache_config, raw_tensors, attn_backends, layout)
    # step: bind them to the layers
    return bind_kv_cache(kv_caches, static_forward_context)
