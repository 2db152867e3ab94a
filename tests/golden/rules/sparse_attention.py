"""Sparse attention: where the slots of selected positions deviate."""

from typing import Any

from golden.deviations import deviation


@deviation(
    "v033_compute_global_topk_indices_and_lens",
    fields=["global_indices"],
    right="A padding token has no slots, as it has none to count.",
)
def a_padding_token_selects_positions(inputs: dict[str, Any]) -> bool:
    """The slots of padding tokens are computed, and their number is 0."""
    valid = inputs["is_valid_token"]
    rows = zip(inputs["topk_indices"].tolist(), valid, strict=True)
    return any(max(row, default=-1) >= 0 for row, is_valid in rows if not is_valid)


@deviation(
    "v033_indexer_logits",
    fields=["logits"],
    right="A block has the codes of all tokens, then the scales of all, as it is written.",
)
def several_tokens_are_scored_in_a_paged_cache(inputs: dict[str, Any]) -> bool:
    """vLLM's fallback reads a block as records of a token, each with its scale."""
    return "kv_cache" in inputs and inputs["q"].shape[1] > 1


@deviation(
    "v033_indexer_metadata",
    fields=["slot_mapping"],
    right="A slot of a ring is written once in a step, by the last token, and padding has none.",
)
def tokens_share_a_slot_of_a_ring_or_padding_has_one(inputs: dict[str, Any]) -> bool:
    """Each token has a slot, and rows past the tokens keep their slots of another cache."""
    if "ring_block" not in inputs:
        return False
    rings = zip(inputs["query_lens"], inputs["ring_block"], strict=True)
    padding = inputs["slot_mapping"][inputs["num_actual_tokens"] :]
    is_shared = any(block and new > inputs["capacity"] for new, block in rings)
    return is_shared or any(slot != -1 for slot in padding)
