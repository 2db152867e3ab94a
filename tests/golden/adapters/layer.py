"""The attention layer, the choice of a backend, and the package's names."""

import os
from typing import Any
from unittest import mock

import torch
from pagetwin.contract.specs import CacheConfig, KVCacheSpec
from pagetwin.engine.layer import Attention
from pagetwin.engine.placeholder_backend import PlaceholderAttentionBackend
from pagetwin.engine.selector import (
    ATTENTION_BACKEND_VARIABLE,
    choose_backend_name,
    get_attn_backend,
    load_backend,
)

from golden.cases import SKIP, adapter

RANGES = ("q_range", "k_range", "v_range")
CONFIG_FIELDS = ("block_size", "cache_dtype", "sliding_window", "calculate_kv_scales")
LAYER_FIELDS = (
    "num_heads",
    "head_size",
    "scale",
    "num_kv_heads",
    "alibi_slopes",
    "logits_soft_cap",
    "per_layer_sliding_window",
    "use_mla",
    "prefix",
    "attn_type",
    "kv_sharing_target_layer_name",
)
IMPL_OPTIONS = (
    "alibi_slopes",
    "sliding_window",
    "kv_cache_dtype",
    "logits_soft_cap",
    "attn_type",
    "kv_sharing_target_layer_name",
)


class Impl:
    """An implementation that records what it gets, and gives twice the query (or thrice)."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        **options: Any,
    ) -> None:
        self.scale = scale
        self.numbers = [num_heads, head_size, scale, num_kv_heads]
        self.options = options
        self.received: list[dict[str, Any]] = []

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tensors = {"query": query, "key": key, "value": value, "output": output}
        shapes = {k: v if v is None else list(v.shape) for k, v in tensors.items()}
        facts = {
            "kv_cache_numel": kv_cache.numel(),
            "attn_metadata": attn_metadata,
            "output_all_zero": None if output is None else not bool(output.any()),
        }
        self.received.append({"forward": {**shapes, **facts}})
        return 3 * query if output is None else output.copy_(2 * query)


class FakeBackend(load_backend("REFERENCE")):
    name = "XFORMERS"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl


class WithoutBuffer(FakeBackend):
    accept_output_buffer = False


def layer_of(
    inputs: dict[str, Any], layers: dict[str, Any], **changed: Any
) -> Attention:
    given = {**inputs, **changed}
    config = given.get("cache_config")
    if config is not None:
        config = CacheConfig(**{k: v for k, v in config.items() if k in CONFIG_FIELDS})
    named = {k: given[k] for k in LAYER_FIELDS if k in given}
    known = {*LAYER_FIELDS, "cache_config", "existing_prefixes", "extra_impl_args"}
    known.add("backend_name")
    extra = dict(inputs.get("extra_impl_args") or {})
    for name in inputs.keys() - known:
        # arguments of the implementation are recorded by name, or together
        value = inputs[name]
        extra |= value if isinstance(value, dict) else {name: value}
    backend = changed.get("attn_backend", FakeBackend)
    if "backend_name" in inputs:
        backend = type("FakeBackend", (backend,), {"name": inputs["backend_name"]})
    if "attn_backend" in changed:
        extra = {}
    return Attention(
        **named,
        cache_config=config,
        attn_backend=backend,
        static_forward_context=layers,
        **extra,
    )


@adapter("attention_layer_init")
def layer_init(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    for prefix in inputs["existing_prefixes"]:
        layer_of(inputs, layers, prefix=prefix, kv_sharing_target_layer_name=None)
    made = layer_of(inputs, layers)
    impl = made.impl
    extra = {k: v for k, v in impl.options.items() if k not in IMPL_OPTIONS}
    names = (
        "num_heads",
        "num_kv_heads",
        "head_size",
        "sliding_window",
        "has_sink",
        "kv_cache_dtype",
        "calculate_kv_scales",
        "use_mla",
        "use_output",
        "layer_name",
        "attn_type",
        "kv_sharing_target_layer_name",
        "_k_scale",
        "_v_scale",
        "_q_scale",
        "_prob_scale",
        "_k_scale_float",
        "_v_scale_float",
        "q_range",
        "k_range",
        "v_range",
    )
    dtype = str(made.dtype).removeprefix("torch.")
    return {
        "attributes": {**{k: getattr(made, k) for k in names}, "dtype": dtype},
        "backend": made.backend,
        "impl": {
            "impl_init_args": impl.numbers + [impl.options[k] for k in IMPL_OPTIONS],
            "impl_init_kwargs": extra,
        },
        # one cache here, one for each stage of a pipeline in vLLM
        "kv_cache_placeholder_shapes": [list(made.kv_cache.shape)],
        "registered_layers": list(layers),
        "extra_repr": made.extra_repr(),
        "get_attn_backend_is_given": made.get_attn_backend().__name__,
    }


class StandIn(str):
    """Recorded metadata, a word, with the number of tokens of the step."""

    num_actual_tokens = 0


def replaced(recorded: Any, tokens: int) -> Any:
    """Return recorded metadata, one or by layer name; what is not a word stays as it is."""
    if isinstance(recorded, dict):
        return {name: replaced(value, tokens) for name, value in recorded.items()}
    if not isinstance(recorded, str):
        return recorded
    made = StandIn(recorded)
    made.num_actual_tokens = tokens
    return made


@adapter("attention_layer_forward")
def layer_forward(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    backend = FakeBackend if inputs["accept_output_buffer"] else WithoutBuffer
    made = layer_of(inputs, {}, attn_backend=backend)
    shape = inputs["query_shape"]
    query = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    key_shape = inputs["key_shape"]
    value_shape = inputs.get("value_shape", key_shape)
    # a layer that shares a cache gets neither
    key = None if key_shape is None else torch.zeros(key_shape)
    value = None if value_shape is None else torch.zeros(value_shape)
    output_shape = inputs["output_shape"]
    metadata = replaced(inputs["attn_metadata"], len(query))
    output = made(query, key, value, metadata, output_shape)
    return {
        "received": made.impl.received,
        "output_shape": list(output.shape),
        "output": output,
    }


@adapter("attention_layer_calc_kv_scales")
def calc_kv_scales(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    config = CacheConfig(calculate_kv_scales=True)
    made = Attention(2, 4, 1.0, 1, cache_config=config, attn_backend=FakeBackend)
    made.calc_kv_scales(inputs["query"], inputs["key"], inputs["value"])
    names = ("_q_scale", "_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float")
    return {
        **{name: getattr(made, name) for name in names},
        "calculate_kv_scales": made.calculate_kv_scales,
        "ranges": [getattr(made, name).item() for name in RANGES],
    }


VLLM_BACKENDS = (
    "FLASH_ATTN",
    "FLASH_ATTN_VLLM_V1",
    "TRITON_ATTN",
    "TRITON_ATTN_VLLM_V1",
    "XFORMERS",
    "XFORMERS_VLLM_V1",
    "ROCM_FLASH",
    "ROCM_AITER_MLA",
    "ROCM_AITER_MLA_VLLM_V1",
    "ROCM_AITER_FA",
    "TORCH_SDPA",
    "TORCH_SDPA_VLLM_V1",
    "FLASHINFER",
    "FLASHINFER_VLLM_V1",
    "FLASHINFER_MLA",
    "TRITON_MLA",
    "TRITON_MLA_VLLM_V1",
    "CUTLASS_MLA",
    "FLASHMLA",
    "FLASHMLA_VLLM_V1",
    "FLASH_ATTN_MLA",
    "PALLAS",
    "PALLAS_VLLM_V1",
    "IPEX",
    "DUAL_CHUNK_FLASH_ATTN",
    "DIFFERENTIAL_FLASH_ATTN",
    "NO_ATTENTION",
    "FLEX_ATTENTION",
    "TREE_ATTN",
)


PLACEHOLDER = PlaceholderAttentionBackend.__name__
DEFAULTS = {"use_mla": False, "has_sink": False}
"""Arguments of vLLM's selector that a call may leave out, as they reach the platform."""


@adapter("get_attn_backend")
def selector(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Our selection by caller and environment, over vLLM's names; the platform is recorded.

    The platform's part, to find a class of that name, has no counterpart: here a name is a class.
    """
    forced, results, calls = None, [], []
    spec = KVCacheSpec(16, 1, 64, torch.float16)
    with mock.patch.dict(os.environ):
        os.environ.pop(ATTENTION_BACKEND_VARIABLE, None)
        for op in inputs["ops"]:
            result: Any = None
            try:
                if op["op"] == "force":
                    forced = op["backend"]
                elif op["op"] == "env" and op["value"] is not None:
                    os.environ[ATTENTION_BACKEND_VARIABLE] = op["value"]
                elif op["op"] == "env":
                    os.environ.pop(ATTENTION_BACKEND_VARIABLE, None)
                elif op["op"] == "call":
                    path = inputs.get("platform_returns", "")
                    result = path.rpartition(".")[2] or PLACEHOLDER
                    if op.get("is_attention_free", False):
                        found = get_attn_backend(
                            forced, spec, "cpu", is_attention_free=True
                        )
                        result = found.__name__
                    else:
                        names = op.keys() - {"op", "is_attention_free"}
                        asked = {**DEFAULTS, **{name: op[name] for name in names}}
                        chosen = choose_backend_name(forced, known=VLLM_BACKENDS)
                        calls.append({"selected": chosen, **asked})
            except ValueError:
                result = {"raises": "ValueError", "message": SKIP}  # in other words
            results.append(result)
    return {"results": results, "platform_calls": calls}
