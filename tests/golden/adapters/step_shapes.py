"""Chunks, drafts, ranks, image ranges and the rows of the block table."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.contract.fast_prefill_metadata import KVSharingFastPrefillMetadata
from pagetwin.contract.kinds import PAD_SLOT_ID
from pagetwin.contract.layer_parameters import PerLayerParameters
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.multimodal_features import MultiModalFeature
from pagetwin.engine.backend_interface import AttentionBackend, AttentionMetadataBuilder

from golden.cases import SKIP, adapter, attempt


def common_metadata(recorded: dict[str, Any]) -> CommonAttentionMetadata:
    """Return the recorded step."""
    return CommonAttentionMetadata(**recorded)


def shown(common: CommonAttentionMetadata) -> dict[str, Any]:
    """Return its fields, to be compared one by one."""
    return {
        field.name: getattr(common, field.name) for field in dataclasses.fields(common)
    }


@adapter("make_local_attention_virtual_batches")
def local_attention(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    chunked = twin.make_local_attention_virtual_batches(
        inputs["attn_chunk_size"],
        common_metadata(inputs["common_attn_metadata"]),
        inputs.get("block_size", 0),  # vLLM's default, which nothing can be divided by
    )
    return {"result": shown(chunked)}


@adapter("make_kv_sharing_fast_prefill_common_attn_metadata")
def fast_prefill(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    common = common_metadata(inputs["common_attn_metadata"])
    wanted = twin.make_kv_sharing_fast_prefill_common_attn_metadata(common)
    same = wanted is common
    return {"same_object": same, "result": None if same else shown(wanted)}


def fake_backend(name: str, builder: type, metadata: type) -> type[AttentionBackend]:
    """Return a backend as far as the factories look at it."""
    return type(
        name,
        (AttentionBackend,),
        {
            "name": "BASE",
            "accept_output_buffer": True,
            "get_builder_cls": staticmethod(lambda: builder),
            "get_metadata_cls": staticmethod(lambda: metadata),
        },
    )


@adapter("subclass_attention_backend")
def attention_backend(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    builder = type(inputs["builder_name"], (AttentionMetadataBuilder,), {})
    others = type("OtherBuilder", (AttentionMetadataBuilder,), {})
    base = fake_backend(inputs["attention_backend_name"], others, object)
    # so that it can be asked as an instance, too
    base.__abstractmethods__ = frozenset()
    made = twin.subclass_attention_backend(inputs["name_prefix"], base, builder)
    again = twin.subclass_attention_backend(inputs["name_prefix"], base, builder)
    made.__abstractmethods__ = frozenset()
    return {
        "class_name": made.__name__,
        "is_subclass": issubclass(made, base),
        "bases": [base.__name__ for base in made.__bases__],
        "get_builder_cls": made.get_builder_cls().__name__,
        "get_builder_cls_is_builder": made.get_builder_cls() is builder,
        "inherited_get_name": made.get_name(),
        "inherited_accept_output_buffer": made.accept_output_buffer,
        "base_builder_unchanged": base.get_builder_cls() is others,
        "on_instance": made().get_builder_cls().__name__,
        "new_class_every_call": made is not again,
        "own_attributes": [name for name in vars(made) if name[0] != "_"],
    }


def recorded_dataclass(name: str, recorded: list[list[Any]]) -> type:
    """Return a dataclass with the recorded fields: name, type, whether it has a default, that."""
    return dataclasses.make_dataclass(
        name,
        [
            (field, object, dataclasses.field(default=default))
            if has_default
            else (field, object)
            for field, _, has_default, default in recorded
        ],
    )


@adapter("subclass_attention_metadata")
def attention_metadata(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    base = recorded_dataclass(inputs["metadata_name"], inputs["base_fields"])
    fields = [(name, object, default) for name, _, default in inputs["fields"]]
    made = twin.subclass_attention_metadata(inputs["name_prefix"], base, fields)
    instance = attempt(lambda: dataclasses.asdict(made(**inputs["construct"])))
    required = dataclasses.MISSING
    return {
        "class_name": made.__name__,
        "is_subclass": issubclass(made, base),
        "fields_in_order": [
            [field.name, "required" if field.default is required else field.default]
            for field in dataclasses.fields(made)
        ],
        "instance": instance,
    }


@adapter("create_fast_prefill_custom_backend")
def fast_prefill_backend(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    common = common_metadata(inputs["common_attn_metadata"])
    saw: dict[str, Any] = {}

    # vLLM's class has one name for all backends; ours begins with that of what it wraps
    @dataclasses.dataclass
    class AttentionMetadata:
        num_actual_tokens: int
        max_query_len: int
        tag: str

    class Builder(AttentionMetadataBuilder):
        def __init__(self) -> None:
            pass

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool
        ) -> Any:
            saw["common_prefix_len"] = common_prefix_len
            saw["fast_build"] = fast_build
            saw["query_start_loc"] = common_attn_metadata.query_start_loc
            saw["same"] = common_attn_metadata is common
            tokens = common_attn_metadata.num_actual_tokens
            longest = common_attn_metadata.max_query_len
            return AttentionMetadata(tokens, longest, "t")

    base = fake_backend("Backend", Builder, AttentionMetadata)
    made = twin.create_fast_prefill_custom_backend(inputs["prefix"], base)
    builder = made.get_builder_cls()
    metadata = builder().build(
        inputs["common_prefix_len"], common, inputs["fast_build"]
    )
    return {
        "backend_name": made.__name__,
        "builder_name": builder.__name__,
        "builder_is_subclass": issubclass(builder, Builder),
        "metadata_class": type(metadata).__name__,
        "isinstance_meta": isinstance(metadata, AttentionMetadata),
        "isinstance_protocol": isinstance(metadata, KVSharingFastPrefillMetadata),
        "metadata": vars(metadata),
        "underlying_build_saw": saw,
    }


def counting(inputs: dict[str, Any], shape: list[int]) -> torch.Tensor:
    """Return a tensor whose elements are their own flat index, or a strided view of it."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    view = whole.permute(inputs["permute"]) if inputs.get("permute") else whole
    return view[:: inputs.get("token_step") or 1]


def values(view: torch.Tensor) -> Any:
    """Return its elements; those of larger tensors are not recorded, and follow from the rest."""
    return view.long().tolist() if view.numel() <= 48 else SKIP


@adapter("reshape_query_for_spec_decode")
def spec_decode_query(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    query = counting(inputs, inputs["query_shape"])
    reshaped = twin.reshape_query_for_spec_decode(query, inputs["batch_size"])
    return {
        "shape": list(reshaped.shape),
        "stride": list(reshaped.stride()),
        "same_storage": reshaped.data_ptr() == query.data_ptr(),
        "values": values(reshaped),
    }


@adapter("reshape_attn_output_for_spec_decode")
def spec_decode_output(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    output = counting(inputs, inputs["attn_output_shape"])
    reshaped = twin.reshape_attn_output_for_spec_decode(output)
    return {
        "shape": list(reshaped.shape),
        "stride": list(reshaped.stride()),
        "same_object": reshaped is output,
        "same_storage": reshaped.data_ptr() == output.data_ptr(),
        "values": values(reshaped),
    }


@adapter("compute_causal_conv1d_metadata")
def causal_conv(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    by_size, batch_ptr, offset_ptr = twin.compute_causal_conv1d_metadata(
        inputs["query_start_loc_p"]
    )

    def described(buffer: torch.Tensor, used: int) -> dict[str, Any]:
        return {
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "length": len(buffer),
            "prefix": buffer[:used].tolist(),
            "rest_is_pad": bool((buffer[used:] == PAD_SLOT_ID).all()),
        }

    found: dict[str, Any] = {"block_sizes": list(by_size), "dict_shares_tensors": True}
    for size, chunks in by_size.items():
        used = chunks["mlist_len"]
        pointers = {
            "batch_ptr": described(chunks["batch_ptr"], used),
            "token_chunk_offset_ptr": described(chunks["token_chunk_offset_ptr"], used),
        }
        found[f"nums_dict_{size}"] = {**chunks, **pointers}
        found["batch_ptr"] = described(batch_ptr, used)
        found["token_chunk_offset_ptr"] = described(offset_ptr, used)
        found["dict_shares_tensors"] &= (
            chunks["batch_ptr"].data_ptr() == batch_ptr.data_ptr()
            and chunks["token_chunk_offset_ptr"].data_ptr() == offset_ptr.data_ptr()
        )
    return found


@adapter("get_per_layer_parameters")
def per_layer_parameters(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    classes = {"Impl": SimpleNamespace}

    def layer(recorded: dict[str, Any]) -> Any:
        if recorded["kind"] != "attention":
            return object()
        name = recorded.get("impl_cls", "Impl")
        cls = classes.setdefault(name, type(name, (), {}))
        impl = cls()
        for attribute, value in recorded["impl"].items():
            setattr(impl, attribute, value)
        return SimpleNamespace(impl=impl)

    layers = {
        name: layer(recorded_layer) for name, recorded_layer in inputs["layers"].items()
    }
    found = twin.get_per_layer_parameters(
        layers, inputs["layer_names"], SimpleNamespace
    )
    return {"result": {name: vars(parameters) for name, parameters in found.items()}}


@adapter("infer_global_hyperparameters")
def global_hyperparameters(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    params = {
        name: PerLayerParameters(**parameters)
        for name, parameters in inputs["per_layer_params"].items()
    }
    found = twin.infer_global_hyperparameters(params)
    first, *others = params
    return {
        "result": vars(found),
        "is_first_object": found is params[first],
        "other_layers": {name: vars(params[name]) for name in others},
    }


@adapter("get_dcp_local_seq_lens")
def dcp_local_seq_lens(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "result": twin.get_dcp_local_seq_lens(
            inputs["seq_lens"],
            inputs["dcp_world_size"],
            inputs["dcp_rank"],
            inputs["interleave_size"],
        )
    }


@adapter("v1_block_table")
def block_table(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    # vLLM's max_num_batched_tokens is the size of a buffer that is not needed here
    given = {
        name: value
        for name, value in inputs.items()
        if name not in ("ops", "max_num_batched_tokens")
    }
    table = twin.BlockTable(**given)
    slots = None
    for op in inputs["ops"]:
        arguments = {name: value for name, value in op.items() if name != "op"}
        result = getattr(table, op["op"])(**arguments)
        slots = result if op["op"] == "compute_slot_mapping" else slots
    return {
        "block_table": table.get_device_tensor(inputs["max_num_reqs"]).tolist(),
        "num_blocks_per_row": table.num_blocks_per_row,
        "slot_mapping": None if slots is None else slots.tolist(),
        "block_size_used": table.block_size,
        "width_used": table.max_num_blocks_per_req,
    }


@adapter("v033_mamba_get_block_table_tensor")
@adapter("v033_mamba_get_block_table_tensor_more")
def mamba_block_table(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    picked = twin.mamba_get_block_table_tensor(**inputs)
    return {"result": picked, "same_object": picked is inputs["block_table"]}


@adapter("v033_compute_mm_prefix_ranges")
def mm_prefix_ranges(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    features = [
        [MultiModalFeature(**feature) for feature in row]
        for row in inputs["mm_features_per_req"]
    ]
    ranges = twin.compute_mm_prefix_ranges(
        features,
        inputs["sliding_window"],
        inputs["clamp_sliding_window"],
        inputs["span_pad"],
    )
    tensor = twin.compute_mm_prefix_range_tensor(ranges, len(features))
    return {"ranges": ranges, "tensor": tensor}


@adapter("v033_fill_mm_prefix_query_ranges")
def mm_prefix_query_ranges(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    ranges = inputs["mm_prefix_range"]
    out = torch.full((inputs["out_rows"], 2), -5, dtype=torch.int32)
    num_rows = twin.fill_mm_prefix_query_ranges(
        out,
        None if ranges is None else {int(req): row for req, row in ranges.items()},
        inputs["query_start_loc_cpu"],
        inputs["seq_lens_cpu"],
    )
    return {"num_rows": num_rows, "out": out.tolist()}
