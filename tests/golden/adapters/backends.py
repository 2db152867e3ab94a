"""vLLM's xFormers backend: its classes, its metadata, a layer's forward."""

from importlib import import_module
from typing import Any

import torch
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.specs import KVCacheSpec

from golden.adapters.attention import NO_FLOAT32, starts_of
from golden.cases import SKIP, adapter, attempt

XFORMERS_MASK = "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"
SHARED_FIELDS = (
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_prefills",
    "num_decodes",
)


def backend_of(twin: Any) -> Any:
    """The backend that mirrors vLLM's: XFORMERS, and the one backend of the reference."""
    module = import_module(f"pagetwin.{twin.name}.backends.backend")
    wanted = "XFORMERS" if twin.name == "optimized" else "REFERENCE"
    return next(backend for backend in module.BACKENDS if backend.name == wanted)


def common_of(recorded: dict[str, Any]) -> CommonAttentionMetadata:
    known = CommonAttentionMetadata.__dataclass_fields__
    given = {name: value for name, value in recorded.items() if name in known}
    return CommonAttentionMetadata(**given)


def build(twin: Any, inputs: dict[str, Any]) -> tuple[Any, CommonAttentionMetadata]:
    spec = KVCacheSpec(inputs["kv_cache_spec"]["block_size"], 1, 32, torch.float32)
    common = common_of(inputs["common_attn_metadata"])
    builder = backend_of(twin).get_builder_cls()(spec, ["layer"], "cpu")
    metadata = builder.build(inputs["common_prefix_len"], common, inputs["fast_build"])
    return metadata, common


def describe(metadata: Any, bias: Any) -> dict[str, Any] | None:
    if metadata is None:
        return None
    fields = {name: getattr(metadata, name) for name in SHARED_FIELDS}
    return fields | {"attn_bias": bias}


def describe_bias(twin: Any, metadata: Any, block_size: int) -> dict[str, Any] | None:
    """xFormers' mask of the decodes, or what our own attention says it must be."""
    decodes = metadata.decode_metadata
    if decodes is None:
        return None
    # padding has no row in the mask
    live = decodes.query_start_loc.diff() > 0
    seq_lens = decodes.seq_lens[live].tolist()
    table = decodes.block_table[live]
    width = table.shape[1] * block_size
    if max(seq_lens, default=0) > width:
        return (
            None  # the reference makes no mask, and validates the rows when it attends
        )
    slots = (int(table.max()) + 1) * block_size if table.numel() else 0
    if twin.name == "optimized" and seq_lens:
        bias = metadata.attn_bias
        assert bias.q_seqinfo.seqstart_py == starts_of([1] * len(seq_lens)).tolist()
        assert list(bias.k_seqinfo.seqlen_py) == seq_lens
        assert bias.k_seqinfo.padding == width and bias.page_size == block_size
        assert torch.equal(bias.block_tables, table)
    seen = [
        sorted(
            int(table[req, p // block_size]) * block_size + p % block_size
            for p in range(length)
        )
        for req, length in enumerate(seq_lens)
    ]
    return {
        "class": XFORMERS_MASK,
        "q_seqstart": starts_of([1] * len(seq_lens)),
        "k_seqlen": seq_lens,
        "k_padding": width,
        "k_seqstart": [width * req for req in range(len(seq_lens) + 1)],
        "page_size": block_size,
        "block_tables": table,
        "materialized_shape": [len(seq_lens), slots],
        "only_zero_or_minus_inf": True,
        "visible_physical_keys": seen,
    }


@adapter("xformers_backend_static")
def static(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    backend, method = backend_of(twin), inputs["method"]
    if twin.name == "reference" and method != "get_kv_cache_shape":
        # the reference has one backend of its own name, which takes every dtype and head size
        backend = backend_of(type("Optimized", (), {"name": "optimized"}))
    if not hasattr(backend, method):
        raise NotImplementedError(f"{method}: expected a method of both backends")
    member = getattr(backend, method)
    # an attribute is recorded like a method
    result = member(*inputs["args"]) if callable(member) else member
    if method == "get_supported_dtypes":
        result = [str(dtype).removeprefix("torch.") for dtype in result]
    if method == "full_cls_name":
        return {"qualname": result[1]}  # the module is vLLM's
    name = "result" if callable(member) else "value"
    return {name: result.__name__ if isinstance(result, type) else result}


@adapter("xformers_impl_init")
def impl_init(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    impl = backend_of(twin).get_impl_cls()(**inputs)
    names = (
        "num_heads",
        "head_size",
        "scale",
        "num_kv_heads",
        "num_queries_per_kv",
        "kv_cache_dtype",
        "kv_sharing_target_layer_name",
        "alibi_slopes",
        "sliding_window",
        "logits_soft_cap",
    )
    return {"attributes": {name: getattr(impl, name) for name in names}}


@adapter("xformers_impl_forward", on_device=True, interpreter_only=NO_FLOAT32)
def impl_forward(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    backend = backend_of(twin)
    impl = backend.get_impl_cls()(**inputs["impl"])
    cache = inputs["kv_cache"]
    spec = KVCacheSpec(cache.shape[2], cache.shape[3], cache.shape[4], cache.dtype)
    common = common_of(inputs["common_attn_metadata"])
    metadata = None
    if not inputs["attn_metadata_is_none"]:
        metadata = backend.get_builder_cls()(spec, ["layer"], "cpu").build(0, common)
    before = cache.clone()
    output = torch.full_like(inputs["query"], -7.0)
    given = output if inputs["output_given"] else None
    result = impl.forward(
        None,
        inputs["query"],
        inputs["key"],
        inputs["value"],
        cache,
        metadata,
        given,
        inputs["output_scale"],
        inputs["output_block_scale"],
    )
    slots = common.slot_mapping[common.slot_mapping >= 0]
    kept = torch.nonzero(common.slot_mapping >= 0).flatten()
    if metadata is None:
        slots, kept = slots[:0], kept[:0]
    flat, old = cache.flatten(1, 2), before.flatten(1, 2)
    elsewhere = torch.ones(flat.shape[1], dtype=torch.bool)
    elsewhere[slots] = False
    return {
        "output": result,
        "returns_output_object": result is output,
        # a profiling run writes nothing
        "written_slots_equal_new_kv": None
        if metadata is None
        else torch.equal(flat[0, slots], inputs["key"][kept])
        and torch.equal(flat[1, slots], inputs["value"][kept]),
        "num_written_slots": len(slots),
        "cache_elsewhere_unchanged": torch.equal(flat[:, elsewhere], old[:, elsewhere]),
        "output_fill_before": -7.0,
    }


@adapter("xformers_metadata_builder_build")
def builder_build(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    metadata, common = build(twin, inputs)
    bias = describe_bias(twin, metadata, inputs["kv_cache_spec"]["block_size"])
    return {
        "metadata": describe(metadata, bias),
        "same_tensors": {
            "query_start_loc": metadata.query_start_loc is common.query_start_loc,
            "seq_lens": metadata.seq_lens is common.seq_lens,
            "block_table": metadata.block_table is common.block_table_tensor,
            "slot_mapping": metadata.slot_mapping is common.slot_mapping,
        },
        "builder_counters": SKIP,  # two counters that vLLM's builder never updates
    }


def describe_part(metadata: Any) -> dict[str, Any] | None:
    if metadata is None:
        return None
    # the reference needs no mask of xFormers
    bias = getattr(metadata, "attn_bias", SKIP)
    if bias is not None and bias is not SKIP:
        bias = type(bias).__name__
    return describe(metadata, bias)


@adapter("xformers_metadata_prefill_decode_split")
def prefill_decode_split(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    metadata, _ = build(twin, inputs)
    found: dict[str, Any] = {
        name: getattr(metadata, name) for name in SHARED_FIELDS[7:]
    }
    for name in ("prefill_metadata", "decode_metadata"):
        part = getattr(metadata, name)
        found[name] = describe_part(part)
        found[f"{name}_cached"] = getattr(metadata, name) is part
        found[f"{name}_nested"] = (
            None if part is None else [part.prefill_metadata, part.decode_metadata]
        )
        found[f"{name}_bias_is_parent_bias"] = SKIP
        if twin.name == "optimized" and part is not None:
            same = part.attn_bias is metadata.attn_bias
            found[f"{name}_bias_is_parent_bias"] = same
    return found


@adapter("xformers_metadata_properties")
def metadata_properties(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    given = inputs["metadata"]
    metadata = backend_of(twin).get_metadata_cls()(
        **given,
        query_start_loc_cpu=given["query_start_loc"],
        seq_lens_cpu=given["seq_lens"],
    )
    return {
        name: attempt(lambda name=name: describe_part(getattr(metadata, name)))
        for name in ("prefill_metadata", "decode_metadata")
    }
