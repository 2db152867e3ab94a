"""CUDA graphs of vLLM V0's form: the state of captured steps."""

from typing import Any

import torch
from pagetwin.contract.v0.graph_classes import GraphInputBuffers
from pagetwin.contract.v0.sequence_classes import SequenceAttentionMetadata

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
    returned = state.prepare_graph_input_buffers(GraphInputBuffers(**buffers), batch)
    return {"returns": returned, "input_buffers": buffers}
