"""Figures of bugs in which two things are taken for one, or one for two."""

from typing import Any

import torch
from pagetwin.contract.extra_keys import ExtraKeys
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.metadata_classes import UBatchSlice
from pagetwin.contract.specs import KVCacheSpec

from .figure import Strip, named, strip


def wrong_kv_head(ops: Any) -> list[Strip]:
    """4 query heads, 2 KV heads, one key. The value of KV head 0 is 10, that of KV head 1 is 20."""
    value = torch.tensor([10.0, 20.0]).view(1, 1, 2, 1)
    out = ops.paged_attention(
        torch.ones(1, 4, 1),
        torch.zeros(1, 1, 2, 1),
        value,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        1,
        1,
    ).flatten()
    heads = [f"head {head}" for head in range(4)]
    kinds = ["a" if number == 10 else "b" for number in out.tolist()]
    return [
        strip("value of each KV head", [10, 20], "ab", heads[:2]),
        strip("output of each query head", out, kinds, heads),
    ]


def adapter_named_like_a_salt(ops: Any) -> list[Strip]:
    """Block size 4. Request a uses an adapter named x; request b has the cache salt x."""
    tokens = [11, 12, 13, 14, 15]
    manager = ops.BlockManager(num_blocks=4, block_size=4)
    manager.allocate_slots("a", 0, 5)
    manager.cache_full_blocks("a", tokens, 5, ExtraKeys(lora_name="x"))
    found = manager.get_computed_blocks(tokens, ExtraKeys(cache_salt="x"))
    return [
        strip("request a, adapter x", tokens, "a"),
        strip("blocks of request a", manager.get_block_ids("a"), "a"),
        strip("request b, salt x", tokens, "b"),
        strip("found for request b", named(found), "a"),
    ]


def equal_hashes(ops: Any) -> list[Strip]:
    """Block size 2. A block is known by the number t0 + 31 * t1 of its tokens t0 and t1."""
    known, asked = [4, 9, 1], [35, 8, 1]
    manager = ops.BlockManager(num_blocks=4, block_size=2)
    manager.allocate_slots("a", 0, 3)
    manager.cache_full_blocks("a", known, 3)
    return [
        strip("tokens of request a", known, "a"),
        strip("number of its first block", [known[0] + 31 * known[1]], "a"),
        strip("tokens of request b", asked, "b"),
        strip("number of this first block", [asked[0] + 31 * asked[1]], "b"),
        strip("found for request b", named(manager.get_computed_blocks(asked)), "a"),
    ]


def shared_lengths_changed(ops: Any) -> list[Strip]:
    """One request with 2 tokens in the cache and 4 new ones, cut into two micro-batches."""
    step = ops.build_common_attn_metadata([4], [2], [[7, 2]], 4)
    before = step.seq_lens.tolist()
    parts = ops.split_attn_metadata(
        [UBatchSlice(slice(0, 1), slice(0, 2)), UBatchSlice(slice(0, 1), slice(2, 4))],
        step,
    )
    return [
        strip("seq_lens of the step, before", before, "a"),
        strip("seq_lens, micro-batch 0", parts[0].seq_lens, "a"),
        strip("seq_lens, micro-batch 1", parts[1].seq_lens, "b"),
        strip("seq_lens of the step, after", step.seq_lens, "a"),
    ]


def layout_guessed_from_the_shape(ops: Any) -> list[Strip]:
    """One block with 2 slots and 2 KV heads. Memory holds the keys 0 to 3, slot after slot."""
    spec = KVCacheSpec(block_size=2, num_kv_heads=2, head_size=1, dtype=torch.float16)
    memory = torch.zeros(8, dtype=torch.float16)
    memory[::2] = torch.arange(4.0)  # key and value of a slot and head are adjacent
    caches = ops.reshape_layered_kv_cache(
        memory.view(torch.int8), spec, num_layers=1, layout=KVCacheLayout.LBNHC
    )
    keys = caches[0, 0, 0, :, :, 0]  # [slots, heads]
    places = [f"slot {slot}, head {head}" for slot in range(2) for head in range(2)]
    return [
        strip("keys in memory", memory[::2].float(), "aabb", places),
        strip("shape of a block", [2, 2], "", ["slots or heads", "heads or slots"]),
        strip("keys that a kernel reads", keys.flatten().float(), "aabb", places),
    ]
