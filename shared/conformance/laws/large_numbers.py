"""Laws of ids, indices and counts that do not fit eight bits.

Each case has few live requests and little data: the numbers are large because of idle requests,
unused blocks and heads of few elements.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..generators.batches import NAN, BatchPlan
from ..generators.caches import any_bytes
from ..generators.options import Call, paged_call
from ..generators.steps import Requests, counts
from ..harness.calling import expect_right, run_call
from ..harness.canaries import packed
from ..harness.expect import expect_same
from ..harness.law import Setting, law
from .slots import SlotStep, tensors_of

BLOCKS = 600
"""Blocks of a cache, more than twice as many as eight bits count."""


def in_far_blocks(call: Call) -> Call:
    """Return a call whose blocks follow 300 blocks that belong to no request."""
    caches = {}
    for name in ("key_cache", "value_cache"):
        cache = call.arguments[name]
        front = cache.new_full((300, *cache.shape[1:]), NAN)
        caches[name] = torch.cat([front, cache])
    table = call.arguments["block_table"].clone()
    rows = [[block_id + 300 for block_id in row] for row in call.rows]
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return replace(call.changed(**caches, block_table=table), rows=rows)


@law("paged_attention", cases=[(1, 1), (20, 3)])
def block_ids_may_pass_255(setting: Setting, query_lens: tuple[int, int]) -> None:
    plan = BatchPlan(query_lens, (40, 33), kv_heads=1, head_size=8)
    call = in_far_blocks(paged_call(plan, setting.device))
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[(20, 1)])
def there_may_be_more_than_255_requests(
    setting: Setting, query_lens: tuple[int, int]
) -> None:
    """Request 1 and the last one are live. A search in 8 steps does not end at the first."""
    first, last = query_lens
    plan = BatchPlan(
        (0, first, *(0,) * 299, last), (0, 25, *(0, 0, 1) * 99, 0, 0, 40),
        kv_heads=1, group=1, head_size=8,
    )  # fmt: skip
    call = paged_call(plan, setting.device)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[(2, 130, 1)])
def more_than_255_heads_are_right(
    setting: Setting, heads: tuple[int, int, int]
) -> None:
    kv_heads, group, query_len = heads
    plan = BatchPlan((query_len,), (9,), kv_heads=kv_heads, group=group, head_size=2)
    call = paged_call(plan, setting.device)
    expect_right(setting, call, run_call(setting, call))


SLOTS = [599, 0, 255, 256, 257, 511, 512]
"""Slots in a cache of blocks of one slot, on both sides of multiples of 256."""


def cache_of(count: int, device: torch.device) -> Tensor:
    """Return [2, BLOCKS, 1, 1, count] of random bytes."""
    return any_bytes((2, BLOCKS, 1, 1, count), torch.float16, 5).to(device)


@law("reshape_and_cache", "gather_cache", "copy_blocks", cases=[1, 3])
def blocks_past_255_are_written_gathered_and_copied(
    setting: Setting, size: int
) -> None:
    cache, device = cache_of(size, setting.device), setting.device
    right = cache.clone()
    new = any_bytes((2, len(SLOTS), 1, size), torch.float16, 6).to(device)
    mapping = torch.tensor(SLOTS, dtype=torch.int64, device=device)
    setting.candidate.reshape_and_cache(*new, cache[0], cache[1], mapping)
    for half in range(2):
        for token, slot in enumerate(SLOTS):
            right[half, slot, 0] = new[half, token]
    expect_same("cache", packed(cache), packed(right))
    # two of more than 255 sequences have tokens
    table = torch.zeros(300, len(SLOTS), dtype=torch.int32, device=device)
    table[1], table[299, :-3] = mapping, mapping[3:]
    starts = torch.full((301,), 3, dtype=torch.int32, device=device)
    starts[:2], starts[-1] = 0, len(SLOTS)
    found = setting.candidate.gather_cache(
        cache[0], cache[1], table, starts, len(SLOTS)
    )
    for half, read in enumerate(found):
        expect_same("gathered", packed(read), packed(right[half, SLOTS, 0]))
    pairs = [[599, 3], [256, 257], [0, 300]]
    setting.candidate.copy_blocks([cache], torch.tensor(pairs))
    after = right.clone()
    for source, destination in pairs:
        after[:, destination] = right[:, source]
    expect_same("copied", packed(cache), packed(after))


@law("concat_and_cache_mla", cases=[None])
def latents_are_written_to_blocks_past_255(setting: Setting, case: None) -> None:
    cache = cache_of(3, setting.device)[0, :, :, 0]
    right = cache.clone()
    new = any_bytes((len(SLOTS), 3), torch.float16, 6).to(setting.device)
    mapping = torch.tensor(SLOTS, dtype=torch.int64, device=setting.device)
    setting.candidate.concat_and_cache_mla(new[:, :2], new[:, 2:], cache, mapping)
    for token, slot in enumerate(SLOTS):
        right[slot, 0] = new[token]
    expect_same("cache", packed(cache), packed(right))


@law("compute_slot_mapping_device", cases=[(0, 1), (1, 3), (3, 7)])
def slots_of_more_than_255_requests_are_right(
    setting: Setting, live: tuple[int, int]
) -> None:
    """The first and the last requests have new tokens, all others have none."""
    new = tuple(live[req % 2] if req < 2 or req > 297 else 0 for req in range(300))
    step = SlotStep(new, (2,) * 300, tuple((req, 0) for req in range(300)), 8)
    found = setting.candidate.compute_slot_mapping_device(
        **tensors_of(step, setting.device), block_size=8, num_tokens=sum(new)
    )
    expect_same("slots", packed(found), torch.tensor(step.slots(), dtype=torch.int64))


@law("StepBuffers", cases=[(257, 1), (1, 256), (300, 2)])
def rows_and_tokens_past_255_are_built(
    setting: Setting, query_lens: tuple[int, int]
) -> None:
    """Two requests in the last rows of buffers for 300."""
    rows, size = [299, 256], 16
    blocks = [[req * 40 + each for each in range(20)] for req in range(2)]
    buffers = setting.candidate.StepBuffers(300, 600, 20, size, setting.device)
    buffers.append_blocks(rows, blocks)
    found: Any = buffers.build(list(query_lens), [0, 3], rows)
    slots = [
        blocks[req][position // size] * size + position % size
        for req, (new, computed) in enumerate(zip(query_lens, (0, 3), strict=True))
        for position in range(computed, computed + new)
    ]
    step = Requests(query_lens, (0, 3))
    expect_same("slots", packed(found.slot_mapping), torch.tensor(slots))
    starts = counts([0, *accumulate(query_lens)])
    expect_same("starts", packed(found.query_start_loc), starts)
    expect_same("lengths", packed(found.seq_lens), counts(step.seq_lens))
