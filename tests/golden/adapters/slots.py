"""Slot mapping, one sequence at a time."""

from typing import Any

from golden.cases import SKIP, adapter


@adapter("compute_slot_mapping_start_idx")
def start_idx(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"start_idx": twin.compute_slot_mapping_start_idx(**inputs)}


@adapter("compute_slot_mapping")
def slot_mapping(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    tables = inputs["block_tables"]
    has_table = tables is not None and not inputs["is_profile_run"]
    table = tables[str(inputs["seq_id"])] if has_table else None
    slots = twin.compute_slot_mapping(
        inputs["is_profile_run"],
        inputs["seq_len"],
        inputs["context_len"],
        inputs["start_idx"],
        inputs["block_size"],
        table,
    ).tolist()
    return {
        # vLLM appends to the list of the batch
        "slot_mapping": inputs["slot_mapping"] + slots,
        "path": SKIP,  # which of vLLM's two loops ran
        "num_appended": len(slots),
    }


@adapter("_compute_slot_mapping_python")
@adapter("_compute_slot_mapping_numpy")
def slots_of_a_range(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Both of vLLM's loops: ours is one function."""
    slots = twin.compute_slot_mapping(
        is_profile_run=False,
        seq_len=inputs["range_end"],
        context_len=inputs["range_start"],
        start_idx=0,
        block_size=inputs["block_size"],
        block_table=inputs["block_table"],
    ).tolist()
    return {"slot_mapping": inputs["slot_mapping"] + slots}
