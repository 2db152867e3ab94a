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
    "v033_sparse_swa_indices",
    fields=["slots", "lens"],
    right="A sequence has no keys past its end.",
)
def an_image_ends_after_the_sequence(inputs: dict[str, Any]) -> bool:
    """A token of a cut image attends to keys of it that are not written yet."""
    most = inputs.get("max_image_tokens", 0)
    return any(
        first <= position <= last and min(last, position + most) >= seq_len
        for spans, new, seq_len in zip(
            inputs.get("image_spans") or [],
            inputs["query_lens"],
            inputs["seq_lens"],
            strict=False,
        )
        for first, last in spans
        for position in range(seq_len - new, seq_len)
    )


def rings_of(inputs: dict[str, Any]) -> list[int]:
    """Return the block of each request's ring, without the null block; none in other cases."""
    blocks: list[int] = inputs.get("ring_block", [])
    if "num_decode_tokens" in inputs:
        slots = inputs["slot_mapping"][: inputs["num_decode_tokens"]]
        blocks = [slot // inputs["capacity"] for slot in slots]
    return [block for block in blocks if block > 0]


@deviation(
    "v033_indexer_metadata",
    "v033_draft_metadata",
    fields=["raises"],
    right="Each request has a ring of its own.",
)
def two_requests_have_one_ring(inputs: dict[str, Any]) -> bool:
    """The requests overwrite the tokens of each other."""
    rings = rings_of(inputs)
    return len(set(rings)) < len(rings)


@deviation(
    "v033_indexer_metadata",
    fields=["slot_mapping"],
    right="A slot of a ring is written once in a step, by the last token, and padding has none.",
)
def tokens_share_a_slot_of_a_ring_or_padding_has_one(inputs: dict[str, Any]) -> bool:
    """Each token has a slot, and rows past the tokens keep their slots of another cache."""
    if "ring_block" not in inputs or two_requests_have_one_ring(inputs):
        return False
    rings = zip(inputs["query_lens"], inputs["ring_block"], strict=True)
    padding = inputs["slot_mapping"][inputs["num_actual_tokens"] :]
    is_shared = any(block and new > inputs["capacity"] for new, block in rings)
    return is_shared or any(slot != -1 for slot in padding)


@deviation(
    "v033_draft_metadata",
    fields=["slot_mapping"],
    right="A token without a ring has no slot, and neither have rows past the tokens.",
)
def a_token_of_a_draft_has_no_ring(inputs: dict[str, Any]) -> bool:
    """A slot of -1 is moved as if block -1 were a ring, and rows past the tokens keep theirs."""
    if "capacity" not in inputs or two_requests_have_one_ring(inputs):
        return False
    size, tokens = inputs["capacity"], inputs["num_decode_tokens"]
    moved = zip(inputs["slot_mapping"][:tokens], inputs["positions"], strict=False)
    is_moved = any(
        slot < size and slot // size * size + position % size != -1
        for slot, position in moved
    )
    return is_moved or any(slot != -1 for slot in inputs["slot_mapping"][tokens:])
