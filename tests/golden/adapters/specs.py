"""Specs of caches: sizes of a page, memory of a request, groups, and strides of all layers."""

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import torch
from pagetwin.contract import specs
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.layouts import (
    KVCacheLayout,
    compute_kv_cache_shape_bytes,
    compute_layout_strides,
)
from pagetwin.contract.spec_memory import (
    EngineLimits,
    max_admission_blocks_per_request,
    max_memory_usage_bytes,
    max_num_blocks_per_req,
    merge_kv_cache_specs,
)

from golden.cases import DTYPES, SKIP, adapter, attempt

NO_EFFECT = {
    # the dtype of the cache says it
    "kv_quant_mode",
    "cache_dtype_str",
    # ranks of tensor parallelism, which the engine divides
    "max_tp_shards",
    # which module of a model has the layer
    "model_version",
    "cache_role",
    "is_draft",
    "is_index_group_leader",
    "non_causal",
    "non_causal_multi_token_decode",
    "topk_buffer_width",
}
"""Fields of vLLM's specs that change no size, and have no counterpart."""
NOT_FIELDS = {"backend", "class", "config", "new_block_size", "specs"}


def spec_class(name: str) -> Any:
    """Return our class of vLLM's name; None if it does not exist."""
    found = getattr(specs, name, None)
    is_spec = isinstance(found, type) and issubclass(found, specs.KVCacheSpec)
    return found if is_spec else None


def spec_of(name: str, recorded: dict[str, Any]) -> specs.KVCacheSpec:
    """Return the spec of vLLM's class and arguments."""
    given = {
        key: value
        for key, value in recorded.items()
        if key not in NO_EFFECT and key not in NOT_FIELDS
    }
    given.setdefault("num_kv_heads", 1)  # vLLM's default for latents
    given["dtype"] = DTYPES[given["dtype"].removeprefix("torch.")]
    if isinstance(given.get("block_stride_alignment"), dict):
        base = given["block_stride_alignment"]["multiple_of"]
        given["block_stride_alignment"] = specs.MultipleOf(base)
    if isinstance(given.get("tokens_per_state"), str):
        given["tokens_per_state"] = Fraction(given["tokens_per_state"])
    if "backend" in recorded:
        given |= content_of(recorded)
    made: specs.KVCacheSpec = spec_class(name)(**given)
    return made


def content_of(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a backend changes for a cache format with measured scales."""
    form = FORMATS.get(recorded.get("kv_quant_mode", "NONE").lower())
    if form is None or not form.is_measured:
        return {}
    heads, size = recorded.get("num_kv_heads", 1), recorded["head_size"]
    size_v = recorded.get("head_size_v") or size
    cell = form.page_bytes(1, 1, size, size_v, torch.uint8)
    if form.channels_per_scale:
        # the keys of a head and its values are head slots of their own
        return {"num_head_slots": 2 * heads, "state_content_bytes": cell // 2}
    return {"state_content_bytes": cell}


def shown(spec: specs.KVCacheSpec) -> dict[str, Any]:
    """Return the fields and sizes of a spec under vLLM's names."""
    found = {field.name: getattr(spec, field.name) for field in fields(spec)}
    page, content = spec.page_size_bytes, spec.real_page_size_bytes
    is_latent = isinstance(spec, specs.MLAAttentionSpec)
    size_v = spec.head_size if spec.head_size_v is None else spec.head_size_v
    per_state = spec.tokens_per_state
    return {
        **dict.fromkeys(NO_EFFECT, SKIP),
        **found,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "head_size_v": 0 if is_latent else size_v,
        "tokens_per_state": str(per_state)
        if isinstance(per_state, Fraction)
        else per_state,
        # vLLM sets the field of a page that is rounded up
        "page_size_padded": found["page_size_padded"]
        or (page if page > content else None),
        "page_size_bytes": page,
        "real_page_size_bytes": content,
    }


@adapter("v033_kv_cache_spec_sizes")
def sizes(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    spec = spec_of(inputs["class"], inputs)
    return {
        **shown(spec),
        "num_heads": spec.num_heads,
        "num_states": spec.num_states,
        "state_content_size_bytes": spec.state_content_size_bytes,
        "num_retained_tokens": getattr(spec, "num_retained_tokens", None),
        "block_stride_alignment_bytes": spec.block_stride_alignment_bytes,
        "logical_shape_bytes_3_blocks": compute_kv_cache_shape_bytes(spec, 3),
        # equal for every class that exists here
        "kind": SKIP,
        "block_table_token_alignment": SKIP,
        "prefix_cacheable": SKIP,
        "prefix_replay_tokens": SKIP,
        "uses_slot_mapping": SKIP,
    }


@adapter("v033_kv_cache_spec_memory")
def memory(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    spec, config = spec_of(inputs["class"], inputs), inputs["config"]
    ranks, longest = config["decode_context_parallel_size"], config["max_model_len"]
    limits = EngineLimits(
        max_model_len=longest,
        max_in_flight_tokens=config["max_in_flight_tokens"],
        decode_context_parallel_size=ranks,
        max_num_encoder_input_tokens=config["max_num_encoder_input_tokens"],
    )
    return {
        "page_size_bytes": spec.page_size_bytes,
        "max_num_blocks_per_req": max_num_blocks_per_req(spec, longest, ranks),
        "max_admission_blocks_per_request": max_admission_blocks_per_request(
            spec, limits
        ),
        "max_memory_usage_bytes": attempt(max_memory_usage_bytes, spec, limits),
    }


@adapter("v033_kv_cache_spec_merge")
def merge(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if "specs" in inputs:
        given = [
            spec_of(inputs["class"], spec_fields) for spec_fields in inputs["specs"]
        ]
        return shown(merge_kv_cache_specs(given))
    # vLLM's copy_with_new_block_size
    spec, size = spec_of(inputs["class"], inputs), inputs["new_block_size"]
    fresh = spec_of(inputs["class"], {**inputs, "block_size": size})
    copy = replace(spec, block_size=size)
    return {**shown(copy), "fresh_page_size_bytes": fresh.page_size_bytes}


PAGES = {
    "attn": specs.KVCacheSpec(16, 2, 64),
    "padded": specs.KVCacheSpec(16, 2, 64, page_size_padded=10240),
    "nvfp4": specs.KVCacheSpec(16, 2, 64, num_head_slots=4, state_content_bytes=36),
    "mla656": specs.MLAAttentionSpec(64, 1, 576, state_content_bytes=656),
    # one state that any number of tokens share, as a block with one cell
    "mamba": specs.KVCacheSpec(1, 1, 64, state_content_bytes=128, page_size_padded=512),
}
"""The specs that the file's notes name."""


@adapter("v033_kv_cache_layout_strides")
def layout_strides(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    spec, blocks = PAGES[inputs["spec"]], inputs["num_blocks"]
    kernel, layout = inputs["kernel_block_size"], KVCacheLayout[inputs["layout"]]
    return {
        "shape": compute_kv_cache_shape_bytes(spec, blocks, kernel),
        "strides_LBHNC_bytes": attempt(
            compute_layout_strides, spec, blocks, inputs["num_layers"], layout, kernel
        ),
    }
