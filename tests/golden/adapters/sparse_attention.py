"""Sparse attention: slots of selected positions."""

from typing import Any

import torch
from torch import Tensor

from golden.cases import adapter


def int32(numbers: Any) -> Tensor:
    """Return numbers as vLLM passes them."""
    return torch.as_tensor(numbers, dtype=torch.int32)


def convert(twin: Any, inputs: dict[str, Any], req_id: Any, **options: Any) -> Any:
    """Return the slots of selected positions, and their counts."""
    table, positions = int32(inputs["block_table"]), inputs["token_indices"]
    names = ("dcp_world_size", "dcp_rank", "dcp_kv_cache_interleave_size")
    recorded = ("dcp_size", "dcp_rank", "interleave")
    ranks = {
        name: inputs[key]
        for name, key in zip(names, recorded, strict=True)
        if key in inputs
    }
    return twin.convert_req_index_to_global_index(
        int32(req_id), table, positions, inputs["block_size"], **ranks, **options
    )


@adapter("v033_convert_req_index_to_global_index")
def convert_indices(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Compact the rows if counts are returned, as vLLM does."""
    is_compact = inputs["return_valid_counts"]
    req_id = int32(inputs["req_id"])
    if inputs["idx_mapping"] is not None:
        req_id = int32(inputs["idx_mapping"])[req_id.long()]
    slots, count = convert(twin, inputs, req_id, compact_valid_to_front=is_compact)
    return {"out": slots, "valid_counts": count.tolist()}


@adapter("v033_sparse_index_helpers")
def index_helpers(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Convert with ranks of context parallelism."""
    is_compact = inputs["compact_valid_to_front"]
    slots, count = convert(
        twin, inputs, inputs["req_id"], compact_valid_to_front=is_compact
    )
    return {"out": slots, "valid_counts": count.tolist()}


@adapter("v033_compute_global_topk_indices_and_lens")
def global_topk(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Convert in place; tokens that are not valid are padding."""
    valid = zip(inputs["token_to_req"], inputs["is_valid_token"], strict=True)
    given = inputs | {"token_indices": inputs["topk_indices"]}
    slots, count = convert(
        twin, given, [req if is_valid else -1 for req, is_valid in valid]
    )
    return {"global_indices": slots, "lens": count.tolist()}
