"""Steps of a draft model: what each of vLLM's kernels computes."""

from typing import Any

import torch
from torch import Tensor

from golden.cases import adapter


def int32(numbers: list[int]) -> Tensor:
    """Return numbers as vLLM passes them."""
    return torch.tensor(numbers, dtype=torch.int32)


@adapter("v033_draft_metadata")
def draft_metadata(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Call the function that takes such arguments."""
    if "capacity" in inputs:
        return next_ring_slots(twin, inputs)
    if "compress_ratio" in inputs:
        return next_states(twin, inputs)
    if "positions" in inputs:
        return eagle_step(twin, inputs)
    if "sampled_token_ids" in inputs:
        tokens, count = twin.eagle_prepare_next_token_padded(
            int32(inputs["sampled_token_ids"]),
            torch.tensor(inputs["discard"], dtype=torch.bool),
            int32(inputs["backup_next_token_ids"]),
            inputs["vocab_size"],
        )
        found = (tokens.tolist(), count.tolist())
        names = ("next_token_ids", "valid_sampled_tokens_count")
    elif "cu_num_draft_tokens" in inputs:
        rows, rejected = twin.eagle_prepare_inputs_padded(
            *(
                int32(inputs[name])
                for name in (
                    "cu_num_draft_tokens",
                    "valid_sampled_tokens_count",
                    "query_start_loc",
                )
            )
        )
        found = (rows.tolist(), rejected.tolist())
        names = ("token_indices_to_sample", "num_rejected_tokens")
    else:
        sizes = (inputs["num_mapped_tokens"], inputs["num_tokens"])
        starts = int32(inputs["query_start_loc"])
        return {"request": twin.compute_token_to_req_indices(starts, *sizes).tolist()}
    return dict(zip(names, found, strict=True))


def eagle_step(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Move each request on by one position."""
    positions = torch.tensor(inputs["positions"], dtype=torch.int64)
    rows = inputs["input_batch_size"] or len(positions)
    lens, moved = int32(inputs["seq_lens"]), torch.zeros_like(positions)
    slots = torch.zeros(rows, dtype=torch.int64)
    twin.eagle_step_update_slot_mapping_and_metadata(
        positions,
        int32(inputs["block_table"]),
        lens,
        inputs["block_size"],
        inputs["max_model_len"],
        moved,
        slots,
        inputs["input_batch_size"],
    )
    return {
        "positions": moved.tolist(),
        "slot_mapping": slots.tolist(),
        "seq_lens": lens.tolist(),
    }


def next_ring_slots(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Find the slot of each request's token in the ring that its last slot is in."""
    capacity, tokens = inputs["capacity"], inputs["num_decode_tokens"]
    rings = [[max(slot // capacity, 0)] for slot in inputs["slot_mapping"][:tokens]]
    lens = [position + 1 for position in inputs["positions"][:tokens]]
    slots = twin.compute_kpool_tail_slot_mapping(
        int32(list(range(tokens + 1))), int32(lens), int32(rings), capacity,
        len(inputs["slot_mapping"]),
    )  # fmt: skip
    return {"slot_mapping": slots.tolist()}


def next_states(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Find the states of requests with one token; keys are counted in states."""
    ratio, lens, reqs = (
        inputs["compress_ratio"],
        inputs["seq_lens"],
        len(inputs["seq_lens"]),
    )
    starts, table = int32(list(range(reqs + 1))), int32(inputs["block_table"])
    slots = twin.get_compressed_slot_mapping(
        torch.zeros(reqs, dtype=torch.int64), starts, int32(lens), table,
        inputs["states_per_block"], ratio,
    )  # fmt: skip
    keys, rows, new = twin.prepare_uniform_decode(int32(lens) // ratio, table, 1)
    request = twin.compute_token_to_req_indices(starts, reqs, reqs)
    return {
        "decode_seq_lens": keys.tolist(),
        "decode_block_table": rows.tolist(),
        "decode_lens": new.tolist(),
        "indices": request.tolist(),
        "per_req_decode_lens": starts.diff().tolist(),
        "slot_mapping": slots.tolist(),
    }
