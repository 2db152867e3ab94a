"""Caches: bytes, views, layouts, specs, and the backends that say how they look."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from pagetwin.contract.layouts import (
    KV_CACHE_LAYOUT_VARIABLE,
    KVCacheLayout,
    get_flashinfer_layout_string,
    get_kv_cache_layout,
    get_supported_kv_cache_layouts,
    is_valid_kv_cache_layout,
    layout_from_name,
)
from pagetwin.contract.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from pagetwin.engine.backend_groups import init_attn_backend
from pagetwin.engine.capabilities import Capabilities, MultipleOf
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend

from golden.cases import DTYPES, SKIP, adapter, attempt

REFERENCE = load_backend("REFERENCE")


def spec_of(recorded: dict[str, Any]) -> KVCacheSpec:
    sizes = (
        recorded["block_size"],
        recorded["num_kv_heads"],
        recorded["head_size"],
        DTYPES[recorded["dtype"]],
    )
    if recorded.get("type") == "mla":
        return MLAAttentionSpec(*sizes)
    window = recorded.get("sliding_window")
    if recorded.get("type", "full") == "full" or window is None:
        return FullAttentionSpec(*sizes)
    return SlidingWindowSpec(*sizes, sliding_window=window)


def config_of(recorded: dict[str, Any]) -> KVCacheConfig:
    return KVCacheConfig(
        recorded["num_blocks"],
        [
            KVCacheTensor(tensor["size"], tensor["shared_by"])
            for tensor in recorded["kv_cache_tensors"]
        ],
        [
            KVCacheGroupSpec(group["layer_names"], spec_of(group["kv_cache_spec"]))
            for group in recorded["kv_cache_groups"]
        ],
    )


def backend_of(recorded: dict[str, Any]) -> Any:
    """Return a backend with the recorded axes and their order; without one, in ours."""

    class Backend(REFERENCE):
        name = recorded["name"]

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
        ) -> tuple[int, ...]:
            values = dict(locals())
            return tuple(
                values[axis] if axis in values else int(axis)
                for axis in recorded["kv_cache_shape"]
            )

        @classmethod
        def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
            order = recorded.get("stride_order")
            axes = range(len(recorded["kv_cache_shape"]))
            return tuple(order if isinstance(order, list) else axes)

    return Backend


def backends_of(recorded: dict[str, Any]) -> dict[str, Any]:
    return {name: backend_of(backend) for name, backend in recorded.items()}


@adapter("allocate_kv_cache")
def allocate(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    raw = twin.allocate_kv_caches(config_of(inputs["kv_cache_config"]))
    groups: dict[int, list[str]] = {}
    for name, tensor in raw.items():
        groups.setdefault(id(tensor), []).append(name)
    return {
        "layers_in_order": list(raw),
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "all_zero": not bool(tensor.any()),
            }
            for name, tensor in raw.items()
        },
        "alias_groups": list(groups.values()),
    }


@adapter("reshape_kv_cache")
def reshape(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    config = config_of(inputs["kv_cache_config"])
    raw = twin.allocate_kv_caches(config)
    caches = twin.reshape_kv_caches(config, raw, backends_of(inputs["attn_backends"]))
    pages = {
        name: group.kv_cache_spec.page_size_bytes
        for group in config.kv_cache_groups
        for name in group.layer_names
    }
    return {
        "layers_in_order": list(caches),
        "kv_caches": {
            name: {
                "shape": list(cache.shape),
                "stride": list(cache.stride()),
                "storage_offset": cache.storage_offset(),
                "dtype": str(cache.dtype).removeprefix("torch."),
                "is_contiguous": cache.is_contiguous(),
            }
            for name, cache in caches.items()
        },
        "page_size_bytes": pages,
        "data_ptr_equal_to_raw": {
            name: cache.data_ptr() == raw[name].data_ptr()
            for name, cache in caches.items()
        },
    }


@adapter("init_kv_cache")
def init(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    layers = {
        name: SimpleNamespace(kv_cache=None)
        for name in inputs["forward_context_layers"]
    }
    config = config_of(inputs["kv_cache_config"])
    caches = twin.init_kv_cache(layers, config, backends_of(inputs["attn_backends"]))
    name_of = {id(cache): name for name, cache in caches.items()}
    return {
        "returns": SKIP,  # ours returns what vLLM writes into the runner's list
        "runner_kv_caches_layers": [name_of[id(cache)] for cache in caches.values()],
        # a layer's cache is one tensor here, and a list of one in vLLM
        "forward_context": {
            name: "UNSET" if layer.kv_cache is None else [name_of[id(layer.kv_cache)]]
            for name, layer in layers.items()
        },
    }


@adapter("get_kv_cache_spec")
def kv_cache_spec(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    class TakesAll(REFERENCE):
        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

    class Impl:
        def __init__(self, *numbers: Any, **options: Any) -> None:
            pass

    layers: dict[str, Any] = {}
    for name, layer in inputs["layers"].items():
        if layer["kind"] != "attention":
            layers[name] = torch.nn.Identity()
            continue
        Attention(
            layer["num_kv_heads"],
            layer["head_size"],
            1.0,
            per_layer_sliding_window=layer["sliding_window"],
            attn_type=layer["attn_type"],
            prefix=name,
            attn_backend=TakesAll,
            static_forward_context=layers,
        )
    dtype = DTYPES[inputs["kv_cache_dtype"]]
    specs = twin.get_kv_cache_spec(layers, inputs["block_size"], dtype)
    fields = ("block_size", "num_kv_heads", "head_size", "page_size_bytes")
    return {
        "result": {
            name: {
                "type": type(spec).__name__,
                "dtype": str(spec.dtype).removeprefix("torch."),
                "sliding_window": getattr(spec, "sliding_window", None),
                "attention_chunk_size": getattr(spec, "attention_chunk_size", None),
                **{field: getattr(spec, field) for field in fields},
            }
            for name, spec in specs.items()
        }
    }


@adapter("init_attn_backend")
def attn_backend(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    builders: list[Any] = []

    class Builder:
        def __init__(self, spec: KVCacheSpec, names: list[str], device: Any) -> None:
            builders.append(self)
            events.append(
                {
                    "event": "construct",
                    "builder": builders.index(self),
                    "kv_cache_spec": f"SPEC{specs.index(spec)}",
                    "layer_names": names,
                    "device": str(device),
                }
            )

    class BuilderWithWorkspace(Builder):
        def get_workspace_buffer(self) -> torch.Tensor:
            number = builders.index(self)
            events.append({"event": "get_workspace", "builder": number})
            return torch.tensor([number])

        def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
            number = builders.index(self)
            source = int(buffer[0])
            events.append(
                {"event": "set_workspace", "builder": number, "from_builder": source}
            )

    def backend(name: str) -> Any:
        # vLLM knows by the name whose builders have a workspace; here they have the methods
        has_workspace = "FLASHINFER" in name
        builder = BuilderWithWorkspace if has_workspace else Builder
        return SimpleNamespace(name=name, get_builder_cls=lambda: builder)

    kinds: dict[str, Any] = {}
    for name in inputs["layers"].values():
        kinds[name] = kinds.get(name) or Hashable(backend(name))
    layers = {
        layer: SimpleNamespace(get_attn_backend=lambda name=name: kinds[name])
        for layer, name in inputs["layers"].items()
    }
    specs = [KVCacheSpec(16 + n, 1, 8) for n in range(len(inputs["kv_cache_groups"]))]
    groups = [
        KVCacheGroupSpec(group["layer_names"], spec)
        for group, spec in zip(inputs["kv_cache_groups"], specs, strict=True)
    ]
    backends, made = init_attn_backend(groups, layers, "cpu")
    return {
        "attn_backends": {layer: chosen.name for layer, chosen in backends.items()},
        "builders_in_order": [builders.index(group.metadata_builder) for group in made],
        "events": events,
    }


class Hashable:
    """A stand-in for a class: equal to itself alone."""

    def __init__(self, attributes: SimpleNamespace) -> None:
        vars(self).update(vars(attributes))


@adapter("kv_cache_layout")
def layout(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    override, results = None, []
    names = {KVCacheLayout.NHD: "NHD", KVCacheLayout.HND: "HND"}
    with mock.patch.dict(os.environ):
        os.environ.pop(KV_CACHE_LAYOUT_VARIABLE, None)
        for op in inputs["ops"]:
            given = op.get("cache_layout", op.get("value"))
            result: Any = None
            try:
                if op["op"] == "get":
                    found = get_kv_cache_layout(override, inputs["connector_layout"])
                    result = names[found]
                elif op["op"] == "set":
                    override = given
                elif op["op"] == "env" and given is not None:
                    os.environ[KV_CACHE_LAYOUT_VARIABLE] = given
                elif op["op"] == "env":
                    os.environ.pop(KV_CACHE_LAYOUT_VARIABLE, None)
                elif "valid" in op["op"]:
                    result = is_valid_kv_cache_layout(given)
            except ValueError:
                result = {"raises": "ValueError", "message": SKIP}  # in other words
            results.append(result)
    return {"results": results}


@adapter("real_backend_kv_layouts")
def real_backends(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    def stride_order() -> tuple[int, ...]:
        layout = layout_from_name(inputs["kv_cache_layout"])
        return REFERENCE.get_kv_cache_stride_order(layout)

    sizes = ("num_blocks", "block_size", "num_kv_heads", "head_size")
    return {
        "name": SKIP,  # vLLM's backends
        "shape": twin.get_kv_cache_shape(**{size: inputs[size] for size in sizes}),
        "stride_order": attempt(stride_order),
    }


@adapter("paged_attention_kv_cache_layout")
def packed(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    heads, size = inputs["num_kv_heads"], inputs["head_size"]
    shape = twin.get_packed_kv_cache_shape(
        inputs["num_blocks"], inputs["block_size"], heads, size
    )
    cache = torch.zeros(shape, dtype=DTYPES[inputs["dtype"]])
    views = twin.split_packed_kv_cache(cache, heads, size)
    split: dict[str, Any] = {
        name: {
            "shape": list(view.shape),
            "stride": list(view.stride()),
            "storage_offset": view.storage_offset(),
        }
        for name, view in zip(("key_cache", "value_cache"), views, strict=True)
    }
    return {"kv_cache_shape": list(shape), "split": {**split, "numel": cache.numel()}}


@adapter("v033_kv_cache_layout")
def layout_of_033(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if inputs["what"] == "from_name":
        return {"result": layout_from_name(inputs["name"]).name}
    if inputs["what"] == "supported":
        declared = [
            names and [KVCacheLayout[name] for name in names]
            for names in inputs["backends"]
        ]
        found = get_supported_kv_cache_layouts(declared)
        return {"result": [layout.name for layout in found]}
    layout = KVCacheLayout[inputs["name"]]
    fields = (
        "stride_order",
        "layer_view_order",
        "is_layer_compact",
        "is_block_contiguous",
        "is_block_compact",
        "is_block_outermost",
    )
    try:
        flashinfer: Any = get_flashinfer_layout_string(layout)
    except ValueError:
        flashinfer = SKIP  # vLLM rejects it too, in its own words
    return {
        **{field: getattr(layout, field) for field in fields},
        "flashinfer": flashinfer,
    }


@adapter("v033_backend_block_sizes")
def block_sizes(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    class Backend(Capabilities):
        supported_kernel_block_sizes = tuple(
            MultipleOf(size["multiple_of"]) if isinstance(size, dict) else size
            for size in inputs["supported_kernel_block_sizes"]
        )

        @staticmethod
        def get_supported_head_sizes() -> list[int]:
            return inputs["supported_head_sizes"]

    dtype = DTYPES[inputs["dtype"]]
    return {
        "supports_block_size": Backend.supports_block_size(inputs["block_size"]),
        "preferred": Backend.get_preferred_block_size(inputs["block_size"]),
        "supports_head_size": Backend.supports_head_size(inputs["head_size"]),
        "supports_dtype": Backend.supports_dtype(dtype),
        "supports_kv_cache_dtype": Backend.supports_kv_cache_dtype(
            inputs["kv_cache_dtype"]
        ),
    }
