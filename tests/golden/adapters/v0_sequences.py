"""Sequence groups and encoders: vLLM's V0 bookkeeping."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from pagetwin.contract.v0.sequence_classes import (
    AttentionMetadata,
    MultiModalPlaceholderMap,
    SequenceAttentionMetadata,
    SequenceGroup,
    SequenceInput,
)

from golden.cases import SKIP, adapter

STATE = (
    "slot_mapping",
    "prefill_seq_lens",
    "context_lens",
    "block_tables",
    "curr_seq_lens",
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
)


# ---- vLLM's inputs as ours


def by_id(tables: Any) -> Any:
    """Return recorded tables, whose ids became strings."""
    if not isinstance(tables, dict):
        return tables
    return {int(seq_id): row for seq_id, row in tables.items()}


def placeholder_map(recorded: dict[str, Any]) -> MultiModalPlaceholderMap:
    return MultiModalPlaceholderMap(
        src_ranges=tuple(range(*bounds) for bounds in recorded["src_ranges"]),
        src_len=recorded["src_len"],
        dest_ranges=tuple(range(*bounds) for bounds in recorded["dest_ranges"]),
        dest_len=recorded["dest_len"],
    )


def recorded_map(ours: MultiModalPlaceholderMap) -> dict[str, Any]:
    return {
        "src_ranges": [[span.start, span.stop] for span in ours.src_ranges],
        "src_len": ours.src_len,
        "dest_ranges": [[span.start, span.stop] for span in ours.dest_ranges],
        "dest_len": ours.dest_len,
    }


def group_of(inter_data: dict[str, Any]) -> SequenceGroup:
    """Return a group from vLLM's parallel lists."""
    sequences = zip(
        inter_data["seq_ids"],
        inter_data["query_lens"],
        inter_data["context_lens"],
        inter_data["curr_sliding_window_blocks"],
        strict=True,
    )
    maps = inter_data["multi_modal_placeholder_maps"] or {}
    return SequenceGroup(
        is_prompt=inter_data["is_prompt"],
        sequences=tuple(
            SequenceInput(
                seq_id=seq_id,
                query_len=query_len,
                context_len=context_len,
                curr_sliding_window_block=blocks,
            )
            for seq_id, query_len, context_len, blocks in sequences
        ),
        block_tables=by_id(inter_data["block_tables"]),
        prefix_cache_hit=inter_data["prefix_cache_hit"],
        multi_modal_placeholder_maps={
            modality: placeholder_map(placeholders)
            for modality, placeholders in maps.items()
        },
    )


def builder_of(twin: Any, inputs: dict[str, Any]) -> Any:
    return twin.CommonMetadataBuilder(
        block_size=inputs["block_size"],
        sliding_window=inputs["sliding_window"],
        chunked_prefill_enabled=inputs["chunked_prefill_enabled"],
    )


def state_of(builder: Any) -> dict[str, Any]:
    """Return copies of what has grown so far."""
    state: dict[str, Any] = {}
    for name in STATE:
        value = getattr(builder, name)
        state[name] = list(value) if isinstance(value, list) else value
    state["multimodal_placeholder_maps"] = {
        modality: recorded_map(placeholders)
        for modality, placeholders in builder.multimodal_placeholder_maps.items()
    }
    return state


def shown(metadata: SequenceAttentionMetadata | None) -> dict[str, Any] | None:
    """Return metadata as plain values; index maps as dictionaries."""
    if metadata is None:
        return None
    values = metadata.asdict_zerocopy()
    if metadata.multi_modal_placeholder_index_maps is not None:
        values["multi_modal_placeholder_index_maps"] = {
            modality: {"src": index_map.src, "dest": index_map.dest}
            for modality, index_map in metadata.multi_modal_placeholder_index_maps.items()
        }
    return values


def metadata_of(recorded: dict[str, Any]) -> SequenceAttentionMetadata:
    """Return metadata with the recorded fields; what it needs besides is made up."""
    values: dict[str, Any] = {"slot_mapping": torch.empty(0, dtype=torch.int64)}
    known = {field.name for field in fields(SequenceAttentionMetadata)}
    values.update({name: kept for name, kept in recorded.items() if name in known})
    return SequenceAttentionMetadata(**values)


# ---- the builder


@adapter("common_metadata_builder_prepare")
def prepare(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    builder = builder_of(twin, inputs)
    result = {
        # which attributes vLLM's constructor sets, and a runner that is none of ours
        "attributes_after_init": SKIP,
        "runner_is_input_builder_runner": SKIP,
        "sliding_window": builder.sliding_window,
        "block_size": builder.block_size,
    }
    builder.prepare()
    if inputs["build_first"]:
        groups = inputs["inter_data_list"]
        for inter_data in groups:
            builder.add_seq_group(group_of(inter_data))
        builder.build(
            [length for inter_data in groups for length in inter_data["seq_lens"]],
            [length for inter_data in groups for length in inter_data["query_lens"]],
        )
        result["state_before_second_prepare"] = state_of(builder)
        builder.prepare()
    result["state_after_prepare"] = state_of(builder)
    return result


@adapter("common_metadata_builder_add_seq_group")
def add_seq_group(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    builder = builder_of(twin, inputs)
    builder.prepare()
    states = []
    for inter_data in inputs["inter_data_list"]:
        builder.add_seq_group(group_of(inter_data))
        states.append(state_of(builder))
    return {"states": states}


@adapter("common_metadata_builder_build")
def build(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    builder = builder_of(twin, inputs)
    buffer = inputs["runner_graph_block_tables"]
    metadata = None
    for call in inputs["calls"]:
        if call == "prepare":
            builder.prepare()
            continue
        # vLLM's build() adds the groups itself
        for inter_data in inputs["inter_data_list"]:
            builder.add_seq_group(group_of(inter_data))
        uses_graph = inputs["cuda_graph_pad_size"] >= 0
        metadata = builder.build(
            inputs["seq_lens"],
            inputs["query_lens"],
            inputs["cuda_graph_pad_size"],
            inputs["batch_size"],
            buffer.shape[1] if uses_graph and buffer is not None else None,
        )
    assert metadata is not None
    return {
        "metadata_class": SKIP,  # the name of a vLLM backend's class
        "metadata": shown(metadata),
        "builder_state": state_of(builder),
        # ours takes the buffer's width alone
        "runner_graph_block_tables_after": buffer,
        "aliases_graph_buffer": buffer is not None
        and metadata.block_tables.untyped_storage().data_ptr()
        == buffer.untyped_storage().data_ptr(),
    }


@adapter("is_block_tables_empty")
def block_tables_empty(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"result": twin.is_block_tables_empty(by_id(inputs["block_tables"]))}


@adapter("make_tensor_with_pad")
def tensor_with_pad(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, inputs["dtype"])
    return {
        "result": twin.make_tensor_with_pad(
            inputs["x"], inputs["pad"], dtype, inputs["max_len"]
        )
    }


@adapter("multi_modal_placeholder_map")
def placeholder_maps(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    merged = MultiModalPlaceholderMap()
    for placeholders in inputs["maps"]:
        merged = merged.extend(placeholder_map(placeholders))
    try:
        index = merged.index_map()
        indices: dict[str, Any] = {"src": index.src, "dest": index.dest}
    except ValueError:
        indices = {"raises": "ValueError", "message": SKIP}  # in other words
    return {"merged": recorded_map(merged), "index_map": indices}


# ---- its metadata


@adapter("v0_xformers_metadata_split")
def metadata_split(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    metadata = metadata_of(inputs["attn_metadata"])
    result: dict[str, Any] = {}
    for name in ("prefill_metadata", "decode_metadata"):
        part = getattr(metadata, name)
        result[name] = shown(part)
        result[f"{name}_cached"] = part is not None and part is getattr(metadata, name)
    return result


@adapter("attention_metadata_asdict_zerocopy")
def asdict_zerocopy(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    @dataclass(frozen=True, kw_only=True)
    class WithTwoMore(AttentionMetadata):
        a: list[int]
        b: int

    metadata = WithTwoMore(**inputs["fields"])
    values = metadata.asdict_zerocopy(inputs["skip_fields"])
    return {
        "keys_in_order": list(values),
        "values": values,
        "same_objects": all(
            converted is inputs["fields"][name] for name, converted in values.items()
        ),
    }


# ---- encoders


@adapter("is_all_encoder_attn_metadata_set")
def encoder_set(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    metadata = metadata_of(inputs["attn_metadata"])
    return {"result": twin.is_all_encoder_attn_metadata_set(metadata)}


@adapter("is_all_cross_attn_metadata_set")
def cross_set(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    recorded = dict(inputs["attn_metadata"])
    # vLLM reads an attribute of this name; ours looks at the fields that it stands for
    if recorded.get("is_all_encoder_attn_metadata_set"):
        recorded["encoder_seq_lens"] = [1]
        recorded["encoder_seq_lens_tensor"] = torch.ones(1, dtype=torch.int32)
        recorded["max_encoder_seq_len"] = 1
    return {"result": twin.is_all_cross_attn_metadata_set(metadata_of(recorded))}


@adapter("get_seq_len_block_table_args")
def seq_len_block_table_args(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    metadata = metadata_of(inputs["attn_metadata"])
    lens, longest, table = twin.get_seq_len_block_table_args(
        metadata, inputs["is_prompt"], inputs["attn_type"]
    )
    stored = [getattr(metadata, field.name) for field in fields(metadata)]
    return {
        "result": [lens, longest, table],
        "same_objects": [
            part is not None and any(part is one for one in stored)
            for part in (lens, longest, table)
        ],
    }


@adapter("get_num_prefill_decode_query_kv_tokens")
def query_kv_tokens(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "result": twin.get_num_prefill_decode_query_kv_tokens(
            metadata_of(inputs["attn_metadata"]), inputs["attn_type"]
        )
    }
