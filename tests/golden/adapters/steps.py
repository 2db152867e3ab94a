"""One step: order, boundary, micro-batches, metadata of every layer."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.contract.metadata_classes import CommonAttentionMetadata, UBatchSlice

from golden.cases import SKIP, adapter

FIELDS = {field.name for field in fields(CommonAttentionMetadata)}
# fields of vLLM's metadata that ours does not have: ranks of prefill context parallelism, and the
# state of three single models or features
NO_COUNTERPART = {
    "req_idx",
    "rswa_prefix_lens",
    "replayssm_decode_base_cpu",
    "dcp_local_seq_lens_cpu_upper_bound",  # ours is exact: dcp_local_seq_lens_cpu
}


def step_of(recorded: dict[str, Any]) -> CommonAttentionMetadata:
    """Return the metadata, with what a case leaves out filled in from the rest."""
    given = {name: value for name, value in recorded.items() if name in FIELDS}
    if given.get("mm_req_doc_ranges"):  # recorded with names of requests
        ranges = given["mm_req_doc_ranges"].items()
        given["mm_req_doc_ranges"] = {int(req): row for req, row in ranges}
    starts = given["query_start_loc_cpu"]
    num_reqs, seq_lens = len(starts) - 1, given["seq_lens_cpu"]
    usual = {
        "query_start_loc": starts,
        "seq_lens": seq_lens,
        "num_computed_tokens_cpu": seq_lens - starts.diff(),
        "max_seq_len": int(seq_lens.max()) if num_reqs else 0,
        "block_table_tensor": torch.zeros(num_reqs, 1, dtype=torch.int32),
        "slot_mapping": torch.zeros(given["num_actual_tokens"], dtype=torch.int64),
    }
    return CommonAttentionMetadata(**(usual | given))


def recorded_fields(metadata: CommonAttentionMetadata) -> dict[str, Any]:
    """Return every field under vLLM's name."""
    found = {name: getattr(metadata, name) for name in FIELDS}
    found["seq_lens_cpu_upper_bound"] = metadata.seq_lens_cpu_upper_bound
    return found | dict.fromkeys(NO_COUNTERPART, SKIP)


def same_fields(one: CommonAttentionMetadata, other: CommonAttentionMetadata) -> bool:
    for name in FIELDS:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, torch.Tensor):
            if not torch.equal(left, right):
                return False
        elif left != right:
            return False
    return True


def copied(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    tensors = {
        name: value.clone()
        for name in FIELDS
        if isinstance(value := getattr(metadata, name), torch.Tensor)
    }
    return metadata.replace(**tensors)


# ---- boundaries


@adapter("split_decodes_and_prefills")
@adapter("v033_split_decodes_and_prefills")
def split(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    options = {k: v for k, v in inputs.items() if k != "common_attn_metadata"}
    step = step_of(inputs["common_attn_metadata"])
    return {"result": twin.split_decodes_and_prefills(step, **options)}


@adapter("split_decodes_prefills_and_extends")
def split_three(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    options = {k: v for k, v in inputs.items() if k != "common_attn_metadata"}
    step = step_of(inputs["common_attn_metadata"])
    return {"result": twin.split_decodes_prefills_and_extends(step, **options)}


@adapter("v033_split_prefill_chunks")
def chunks(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"result": twin.split_prefill_chunks(**inputs)}


# ---- order


def reordered(
    twin: Any, inputs: dict[str, Any], *names: str, threshold: int = 1
) -> dict[str, Any]:
    req_ids = inputs["req_ids"]
    order = twin.reorder_batch_to_split_decodes_and_prefills(
        [inputs["num_scheduled_tokens"][req_id] for req_id in req_ids],
        inputs.get("decode_threshold", threshold),
        **{name.removesuffix("_cpu"): _list(inputs[name]) for name in names},
    )
    return {
        "modified": order != list(range(len(order))),
        "num_swaps": num_swaps(order),
        "swaps": SKIP,  # in which order vLLM calls swap_states; ours returns the order
        "final_req_ids": [req_ids[index] for index in order],
    }


def _list(counts: Any) -> list[int]:
    return counts.tolist() if isinstance(counts, torch.Tensor) else list(counts)


def num_swaps(order: list[int]) -> int:
    """Return how many swaps of two rows make the order: one less than each cycle is long."""
    seen: set[int] = set()
    swaps = 0
    for place in range(len(order)):
        while place not in seen:
            seen.add(place)
            place = order[place]
            swaps += place not in seen
    return swaps


@adapter("reorder_batch_to_split_decodes_and_prefills", "0.11.0")
@adapter("xformers_reorder_batch")
def two_regions(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return reordered(twin, inputs)


@adapter("reorder_batch_to_split_decodes_and_prefills")
def three_regions(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return reordered(twin, inputs, "num_computed_tokens_cpu")


@adapter("reorder_batch_to_split_decodes_and_prefills", "0.33.0")
def four_regions(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return reordered(twin, inputs, "num_computed_tokens_cpu", "num_prompt_tokens")


# ---- micro-batches


def ubatch_slice(recorded: dict[str, list[int]]) -> UBatchSlice:
    return UBatchSlice(
        slice(*recorded["request_slice"]), slice(*recorded["token_slice"])
    )


@adapter("slice_query_start_locs")
def starts(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    given = inputs["query_start_loc"]
    before = given.clone()
    result = twin.slice_query_start_locs(given, slice(*inputs["request_slice"]))
    return {
        "result": result,
        "input_unchanged": torch.equal(given, before),
        "shares_storage": (
            result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        ),
    }


@adapter("make_metadata_with_slice")
def micro_batch(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    step = step_of(inputs["attn_metadata"])
    before = copied(step)
    part = twin.make_metadata_with_slice(ubatch_slice(inputs["ubatch_slice"]), step)
    return {
        "result": recorded_fields(part),
        "input_unchanged": same_fields(step, before),
    }


@adapter("make_metadata_with_slice", "0.33.0")
def micro_batch_033(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    found = micro_batch(twin, inputs)
    _skip_fields_of_033(found["result"])
    return found


def _skip_fields_of_033(result: dict[str, Any]) -> None:
    """Skip the longest sequence, there an upper bound, and counts that 0.33 does not have."""
    result["max_seq_len"] = SKIP
    result["num_computed_tokens_cpu"] = SKIP


@adapter("split_attn_metadata")
def micro_batches(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    parts = twin.split_attn_metadata(
        [ubatch_slice(bounds) for bounds in inputs["ubatch_slices"]],
        step_of(inputs["common_attn_metadata"]),
    )
    return {"result": [recorded_fields(part) for part in parts]}


@adapter("split_attn_metadata", "0.33.0")
def micro_batches_033(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    found = micro_batches(twin, inputs)
    for part in found["result"]:
        _skip_fields_of_033(part)
    return found


# ---- metadata


@adapter("v033_common_attention_metadata_methods")
def methods(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    step = step_of(inputs["common_attn_metadata"])
    computed = step.compute_num_computed_tokens()
    part = step.unpadded(inputs["num_actual_tokens"], inputs["num_actual_reqs"])
    return {
        "batch_size": step.batch_size(),
        "naive_query_lens": step.naive_query_lens(),
        "num_computed_tokens": computed,
        "cached": step.compute_num_computed_tokens() is computed,
        "unpadded": recorded_fields(part),
        "replaced_max_query_len": step.replace(max_query_len=77).max_query_len,
    }


@adapter("build_attn_metadata")
def every_layer(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []

    def builder(number: int) -> SimpleNamespace:
        def build(common_prefix_len: int, common: CommonAttentionMetadata) -> object:
            made = recorded_fields(common)
            calls.append(
                {
                    "builder": number,
                    "common_prefix_len": common_prefix_len,
                    "common_attn_metadata": made,
                    "max_query_len_type": type(common.max_query_len).__name__,
                }
            )
            return SimpleNamespace(number=number)

        return SimpleNamespace(build=build)

    def halves(buffer: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.tensor(buffer["np"], dtype=torch.int32)
        device = buffer.get("gpu")
        return host if device is None else torch.tensor(device).int(), host

    groups = inputs["kv_cache_groups"]
    num_builders = inputs.get("num_builders", len(inputs.get("builders", groups)))
    starts_device, starts_host = halves(inputs["query_start_loc"])
    lens_device, lens_host = halves(inputs["seq_lens"])
    metadata = twin.build_attn_metadata(
        [builder(number) for number in range(num_builders)],
        inputs["num_reqs"],
        inputs["num_tokens"],
        starts_device,
        starts_host,
        lens_device,
        lens_host,
        inputs["num_computed_tokens_cpu"],
        inputs["block_tables"],
        list(inputs["slot_mappings"]),
        [group["layer_names"] for group in groups],
        inputs.get("num_tokens_padded"),
    )
    return {
        "calls": calls,
        "layer_to_group": {name: made.number for name, made in metadata.items()},
    }
