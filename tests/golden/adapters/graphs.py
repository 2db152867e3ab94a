"""CUDA graphs: who can be captured, and the builders' base."""

from typing import Any

import pagetwin.engine.backend_interface as interface
import torch
from pagetwin.contract.graph_support import AttentionCGSupport, GroupSupport
from pagetwin.contract.specs import KVCacheSpec

from golden.adapters.names import described_class
from golden.cases import SKIP, adapter, attempt, is_error


@adapter("v033_attn_cg_support")
def attn_cg_support(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    groups = [
        [
            GroupSupport(
                AttentionCGSupport[member["support"]],
                member["backend"],
                tuple(member["layer_names"]),
            )
            for member in group
        ]
        for group in inputs["attn_groups"]
    ]
    checked = inputs["checked_layer_names"]
    info = twin.get_attn_cg_support(groups, None if checked is None else set(checked))
    if inputs["narrow"] is not None:
        level, backend = inputs["narrow"]
        info = info.narrow(AttentionCGSupport[level], backend)
    return {
        "min_cg_support": info.min_cg_support.name,
        "min_cg_attn_backend": info.min_cg_attn_backend,
    }


CASCADE_ARGUMENTS = {
    "query_lens": [1],
    "num_query_heads": 8,
    "num_kv_heads": 8,
    "use_alibi": False,
    "use_sliding_window": False,
    "use_local_attention": False,
    "num_sms": 132,
    "dcp_world_size": 1,
}
"""What was passed beside a common prefix that is recorded alone."""


class RecordingBuilder(interface.AttentionMetadataBuilder):
    """A builder that notes how it was called."""

    calls: list[dict[str, Any]]

    def build(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append({"args": list(arguments), "kwargs": named})
        return "BUILT"


def recording_builder() -> RecordingBuilder:
    spec = KVCacheSpec(16, 1, 8, torch.float32)
    builder = RecordingBuilder(spec, ["l0"], "cpu")
    builder.calls = []
    return builder


@adapter("attention_metadata_builder_defaults")
def builder_defaults(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    builder = recording_builder()
    given = inputs["kwargs"]
    if inputs["method"] == "abstract":
        base = interface.AttentionMetadataBuilder
        made: Any = attempt(base, builder.kv_cache_spec, ["l0"], "cpu")  # type: ignore[abstract]
        return {
            "abstract_methods": described_class(base)["abstract_methods"],
            "instantiate": made["raises"] if is_error(made) else None,
        }
    if inputs["method"] == "__init__":
        spec_kept = isinstance(builder.kv_cache_spec, KVCacheSpec)
        device_kept = builder.device == torch.device("cpu")
        return {
            "attributes": {
                "kv_cache_spec": "SPEC" if spec_kept else None,
                "layer_names": builder.layer_names,
                "vllm_config": SKIP,  # a builder here takes what it needs by name
                "device": "DEV" if device_kept else None,
            }
        }
    method = getattr(builder, inputs["method"])
    if inputs["method"].startswith("build"):
        given = {"common_attn_metadata": "COMMON", **given}
    elif given.keys() == {"common_prefix_len"}:
        given = {**given, **CASCADE_ARGUMENTS}
    result = method(**given)
    return {"result": result, "build_calls": builder.calls}


@adapter("attention_metadata_builder_init_reorder_batch_threshold")
def reorder_batch_threshold(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    builder = recording_builder()
    builder.init_reorder_batch_threshold(
        inputs["reorder_batch_threshold"],
        inputs["supports_spec_as_decode"],
        inputs["supports_dcp_with_varlen"],
        (inputs["speculative_config"] or {}).get("num_speculative_tokens"),
        inputs["decode_context_parallel_size"],
    )
    return {
        "reorder_batch_threshold": builder.reorder_batch_threshold,
        "class_attribute": RecordingBuilder.reorder_batch_threshold,
    }
