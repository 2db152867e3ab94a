"""Figures of bugs in which an edge or a start is wrong by one, or by a constant."""

from typing import Any

from pagetwin.contract.metadata_classes import UBatchSlice

from .attention import paged_weights
from .figure import Strip, named, strip


def last_block_missing(ops: Any) -> list[Strip]:
    """Block size 4. A request with 9 tokens gets free blocks until it has as many as needed."""
    count = ops.blocks_needed(9, 4)
    row = [7, 2, 5][:count]
    slots: list[object] = []
    for position in range(9):
        try:
            slots += ops.compute_slot_mapping_batch([1], [position], [row], 4).tolist()
        except IndexError:
            slots.append("none")
    return [
        strip("free blocks", [7, 2, 5], "off"),
        strip("blocks_needed(9, 4)", [count]),
        strip("block-table row", row, "a"),
        strip(
            "slot of each token",
            slots,
            ["off" if slot == "none" else "a" for slot in slots],
            range(9),
        ),
    ]


def window_one_too_wide(ops: Any) -> list[Strip]:
    """Sliding window 3. The new token has position 5, and all scores are 0."""
    weights = paged_weights(ops, 1, [0.0] * 6, sliding_window=3)[0]
    keys = [f"key {key}" for key in range(6)]
    return [
        strip("distance to the query", [5 - key for key in range(6)], "", keys),
        strip(
            "weights of query 5",
            weights,
            ["a" if weight else "off" for weight in weights.tolist()],
            keys,
        ),
    ]


def decode_attends_to_key_zero(ops: Any) -> list[Strip]:
    """Causal attention. 5 tokens are in the cache, 1 is new, and all scores are 0."""
    weights = paged_weights(ops, 1, [0.0] * 6)[0]
    keys = [f"key {key}" for key in range(6)]
    return [
        strip("tokens", ["cached"] * 5 + ["new"], ["a"] * 5 + ["new"], range(6)),
        strip(
            "weights of the new token",
            weights,
            ["a" if weight else "off" for weight in weights.tolist()],
            keys,
        ),
    ]


def no_token_left_to_compute(ops: Any) -> list[Strip]:
    """Block size 4. A prompt of 8 tokens was computed, its request is done. It arrives again."""
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]
    manager = ops.BlockManager(num_blocks=4, block_size=4)
    manager.allocate_slots("first", 0, 8)
    manager.cache_full_blocks("first", prompt, 8)
    manager.free("first")
    found = manager.get_computed_blocks(prompt)
    left = prompt[len(found) * 4 :]
    return [
        strip("prompt", prompt, "a", range(8)),
        strip("cached", named(sorted(manager.cached_blocks())), "off"),
        strip("found in the cache", named(found), "a"),
        strip("tokens left to compute", left, "new", range(8 - len(left), 8)),
    ]


def second_half_starts_at_the_first(ops: Any) -> list[Strip]:
    """One request with 2 tokens in the cache and 6 new ones, cut after 3 of them."""
    step = ops.build_common_attn_metadata([6], [2], [[7, 2]], 4)
    parts = ops.split_attn_metadata(
        [UBatchSlice(slice(0, 1), slice(0, 3)), UBatchSlice(slice(0, 1), slice(3, 6))],
        step,
    )
    strips = [strip("slot_mapping of the step", step.slot_mapping, "a", range(2, 8))]
    for kind, part in zip("ab", parts, strict=True):
        name = "first half" if kind == "a" else "second half"
        computed = int(part.num_computed_tokens_cpu)
        strips += [
            strip(f"slots, {name}", part.slot_mapping, kind),
            strip(f"positions, {name}", range(computed, computed + 3), kind),
        ]
    return strips
