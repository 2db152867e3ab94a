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
