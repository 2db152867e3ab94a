"""CUDA graphs: the state of captured steps, who can be captured, and the builders' base."""

from typing import Any

import pagetwin.contract.graph_classes as graphs
import pagetwin.engine.backend_interface as interface
import torch
from pagetwin.contract.sequence_classes import SequenceAttentionMetadata
from pagetwin.contract.specs import KVCacheSpec

from golden.adapters.names import described_class
from golden.cases import SKIP, adapter, attempt, is_error


def state_of(twin: Any, inputs: dict[str, Any]) -> Any:
    runner = inputs["runner"]
    return twin.CommonAttentionState(
        runner["max_block_per_batch"],
        runner["max_seq_len_to_capture"],
        "cpu",
        inputs["is_encoder_decoder_model"],
    )


def whole_buffers(state: Any, max_batch_size: int) -> Any:
    """Return the buffers of a state that captures."""
    return state.get_graph_input_buffers(
        state.graph_capture_get_metadata_for_batch(max_batch_size)
    )


def fill_table(table: torch.Tensor, inputs: dict[str, Any]) -> None:
    """Write the runner's block table into the state's own: in vLLM both are one."""
    runner_table = inputs["runner"]["graph_block_tables"]
    part = tuple(map(slice, map(min, table.shape, runner_table.shape)))
    table[part] = runner_table[part]


def what_is_left(state: Any) -> dict[str, Any]:
    """Return a state's flag, and vLLM's names of its buffers if they are still there."""
    left = ("_graph_block_tables", "_graph_seq_lens", "_graph_slot_mapping")
    capturing = state.is_graph_capturing
    return {
        "_is_graph_capturing": capturing,
        "left_attributes": list(left) if capturing else [],
    }


@adapter("common_attention_state_graph_capture")
def graph_capture(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    state = state_of(twin, inputs)
    found: dict[str, Any] = {
        "capturing_before": state.is_graph_capturing,
        "begin_forward_returns": SKIP,  # a hook that does nothing
        "graph_clone_outside": attempt(state.graph_clone, inputs["batch_size"]),
    }
    runner_table = inputs["runner"]["graph_block_tables"]
    with state.graph_capture(inputs["max_batch_size"]):
        buffers = whole_buffers(state, inputs["max_batch_size"])
        found["inside"] = {
            "_is_graph_capturing": state.is_graph_capturing,
            "_graph_slot_mapping": buffers.slot_mapping,
            "_graph_seq_lens": buffers.seq_lens_tensor,
            "_graph_block_tables": buffers.block_tables,
            "block_tables_alias_runner": buffers.block_tables.data_ptr()
            == runner_table.data_ptr(),
        }
        clone = state.graph_clone(inputs["batch_size"])
        settings = ("max_blocks", "max_seq_len_to_capture", "device")
        found["clone"] = {
            "class": type(clone).__name__,
            "is_self": clone is state,
            # the runner is where vLLM's state has its settings
            "same_runner": all(
                getattr(clone, n) == getattr(state, n) for n in settings
            ),
            "capturing": clone.is_graph_capturing,
        }
    found["after"] = what_is_left(state)
    try:
        with state.graph_capture(inputs["max_batch_size"]):
            raise KeyError
    except KeyError:
        found["exception_inside_leaves_state"] = what_is_left(state)
    return found


@adapter("common_attention_state_get_metadata_for_batch")
def get_metadata_for_batch(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    state = state_of(twin, inputs)
    get = state.graph_capture_get_metadata_for_batch
    outside = attempt(get, inputs["batch_size"])
    with state.graph_capture(inputs["max_batch_size"]):
        whole = whole_buffers(state, inputs["max_batch_size"])
        fill_table(whole.block_tables, inputs)
        found = attempt(get, inputs["batch_size"])
    result = found if is_error(found) else found.asdict_zerocopy()
    return {"outside_capture": outside, "result": result}


@adapter("common_attention_state_get_graph_input_buffers")
def get_graph_input_buffers(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    state = state_of(twin, inputs)
    with state.graph_capture(inputs["max_batch_size"]):
        whole = whole_buffers(state, inputs["max_batch_size"])
        fill_table(whole.block_tables, inputs)
        captured = state.graph_capture_get_metadata_for_batch(inputs["batch_size"])
    buffers = state.get_graph_input_buffers(captured).present()
    places = {name: buffer.data_ptr() for name, buffer in whole.present().items()}
    return {
        "keys_in_order": list(buffers),
        "buffers": buffers,
        "identity": {
            name: buffer.data_ptr() == places[name] for name, buffer in buffers.items()
        },
    }


@adapter("common_attention_state_prepare_graph_input_buffers")
def prepare_graph_input_buffers(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    state = state_of(twin, inputs)
    buffers = dict(inputs["input_buffers"])
    if inputs["is_encoder_decoder_model"]:
        # slots have 64 bits here
        buffers["cross_slot_mapping"] = buffers["cross_slot_mapping"].long()
    lens = inputs["attn_metadata"].get("seq_lens_tensor")
    usual = {"max_decode_seq_len": 0 if lens is None else int(lens.max())}
    batch = SequenceAttentionMetadata(**(usual | inputs["attn_metadata"]))
    returned = state.prepare_graph_input_buffers(
        graphs.GraphInputBuffers(**buffers), batch
    )
    return {"returns": returned, "input_buffers": buffers}


@adapter("v033_attn_cg_support")
def attn_cg_support(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    groups = [
        [
            graphs.GroupSupport(
                graphs.AttentionCGSupport[member["support"]],
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
        info = info.narrow(graphs.AttentionCGSupport[level], backend)
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
