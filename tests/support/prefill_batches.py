"""Batches and options of the tests of Hopper's prefill kernel."""

from typing import Any

from pagetwin.conformance.cases.batches import BatchPlan

BATCHES = {
    "one tile": BatchPlan((64,), (64,)),
    "a prompt": BatchPlan((400,), (400,), needle="first"),
    "a chunk of a prompt": BatchPlan((130,), (515,), needle="tile edge"),
    "ragged": BatchPlan(
        (1, 200, 0, 77, 129, 3), (50, 200, 40, 300, 129, 260), needle="last"
    ),
    "fewer queries than keys": BatchPlan((17, 65), (17, 1000)),
    "many requests": BatchPlan(
        (2,) * 70 + (100,), (5,) * 70 + (300,), needle="first new"
    ),
    "blocks of 48": BatchPlan((150,), (333,), block_size=48, needle="block edge"),
    "blocks of 8": BatchPlan((150,), (333,), block_size=8, needle="block edge"),
    "blocks of 24, heads before slots": BatchPlan(
        (150, 66), (333, 66), block_size=24, layout="hnd", needle="block edge"
    ),
    "blocks of 64": BatchPlan((150, 9), (333, 70), block_size=64),
    "blocks of 256": BatchPlan(
        (150, 9), (600, 70), block_size=256, needle="block edge"
    ),
    "heads before slots": BatchPlan((150, 66), (333, 66), layout="hnd"),
    "interleaved": BatchPlan((150, 66), (333, 66), layout="interleaved"),
    "both": BatchPlan((150, 66), (333, 66), layout="interleaved hnd", fused=False),
    "two layouts": BatchPlan(
        (150, 66), (333, 66), layout="hnd", value_layout="interleaved"
    ),
    "shared blocks": BatchPlan((90, 66), (333, 400), table="shared prefix"),
    "one head each": BatchPlan((150,), (333,), group=1, kv_heads=3),
    "three heads to one": BatchPlan((150, 66), (333, 66), group=3),
    "four heads to one": BatchPlan(
        (1, 200, 0, 77, 129), (50, 200, 40, 300, 129), group=4, needle="last"
    ),
    "eight heads to one": BatchPlan((150, 7), (333, 9), group=8, padding=3),
    "sixty-four heads to one": BatchPlan((35, 9), (200, 9), group=64, kv_heads=1),
    "seven heads to one": BatchPlan((150,), (333,), group=7, kv_heads=1, padding=3),
    "seventy-one heads to one": BatchPlan(
        (35, 1, 0, 150), (200, 9, 40, 151), group=71, kv_heads=1, fused=False, padding=3
    ),
    "forty-eight heads to one": BatchPlan(
        (35, 9), (200, 9), group=48, kv_heads=1, fused=False, needle="last"
    ),
    "a large scale": BatchPlan((150,), (333,), scale=1.0, spare_max=7),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "a window of one key": {"sliding_window": 1},
    "a window": {"sliding_window": 100},
    "a window of a tile": {"sliding_window": 128},
    "a window of several tiles": {"sliding_window": 330},
    "chunks": {"attention_chunk_size": 100},
    "chunks of a tile": {"attention_chunk_size": 64},
    "a window in chunks": {"sliding_window": 40, "attention_chunk_size": 150},
    "a cap": {"logits_soft_cap": 3.0},
    "a cap far above the scores": {"logits_soft_cap": 1000.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 90, "logits_soft_cap": 20.0, "sinks": True},
}
