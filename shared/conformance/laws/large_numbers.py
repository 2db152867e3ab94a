"""Laws of ids, indices and counts that do not fit 8 and 16 bits.

Each case has few live requests and little data: the numbers are large because of idle requests,
unused blocks and heads of few elements.
"""

from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..candidates.calls.calling import expect_right, run_call
from ..candidates.setting import Setting
from ..cases.batches import NAN, BatchPlan
from ..cases.caches import any_bytes
from ..cases.options import Call, paged_call
from ..cases.steps import Requests, counts
from ..checks.canaries import packed
from ..checks.expect import expect_same
from .law import law
from .slots import SlotStep, tensors_of

BLOCKS = 65_900
"""Blocks of a cache, more than 16 bits count."""
FRONT = 65_836
"""Blocks before those of a call. In 8 and in 16 bits, its blocks have other numbers."""


def in_far_blocks(call: Call) -> Call:
    """Return a call whose blocks follow blocks that belong to no request."""
    caches = {}
    for name in ("key_cache", "value_cache"):
        cache = call.arguments[name]
        front = cache.new_full((FRONT, *cache.shape[1:]), NAN)
        caches[name] = torch.cat([front, cache])
    table = call.arguments["block_table"].clone()
    rows = [[block_id + FRONT for block_id in row] for row in call.rows]
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return replace(call.changed(**caches, block_table=table), rows=rows)


@law("paged_attention", cases=[(1, 1), (20, 3), (4, 1), (1, 0)])
def block_ids_may_pass_255(setting: Setting, query_lens: tuple[int, int]) -> None:
    plan = BatchPlan(
        query_lens, (320, 33), block_size=4, kv_heads=1, head_size=8, needle="first"
    )
    call = in_far_blocks(paged_call(plan, setting.device))
    expect_right(setting, call, run_call(setting, call))


def after_long_context(call: Call, blocks: int) -> Call:
    """Return a call whose sequences begin with their first block, repeated that often."""
    rows = [row[:1] * blocks + row for row in call.rows]
    table = call.arguments["block_table"]
    front = table[:, :1].expand(-1, blocks)
    size = call.arguments["key_cache"].shape[1]
    changes = {
        "block_table": torch.cat([front, table], 1),
        "seq_lens": call.arguments["seq_lens"] + blocks * size,
        "max_seq_len": call.arguments["max_seq_len"] + blocks * size,
    }
    lens = tuple(length + blocks * size for length in call.key_lens)
    return replace(call.changed(**changes), rows=rows, key_lens=lens)


LONG_CONTEXTS: list[tuple[tuple[int, int], str]] = [
    ((1, 1), "sliding_window"),
    ((20, 0), "sliding_window"),
    ((4, 1), "attention_chunk_size"),
    ((1, 2), "sliding_window"),
]


@law("paged_attention", cases=LONG_CONTEXTS)
def the_end_of_a_context_past_16_bits_is_read(
    setting: Setting, case: tuple[tuple[int, int], str]
) -> None:
    """A window or chunk hides all keys except the last ones, so that few tiles are computed."""
    query_lens, option = case
    plan = BatchPlan(
        query_lens, (70, 33), kv_heads=1, group=1, head_size=8, needle="last"
    )
    given: dict[str, Any] = {option: 40 if option == "sliding_window" else 65_632}
    call = paged_call(plan, setting.device, **given)
    call = after_long_context(call, 4102)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[(1, 0), (3, 0)])
def more_than_255_tiles_of_keys_are_read(
    setting: Setting, query_lens: tuple[int, int]
) -> None:
    plan = BatchPlan(
        query_lens, (70, 33), kv_heads=1, group=1, head_size=8, needle="last"
    )
    call = after_long_context(paged_call(plan, setting.device), 520)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[(290, 3), (300, 1)])
def more_than_255_new_tokens_are_right(
    setting: Setting, query_lens: tuple[int, int]
) -> None:
    """The tokens of the second request come after those of the first."""
    plan = BatchPlan(query_lens, (300, 40), kv_heads=1, group=1, head_size=8, padding=3)
    call = paged_call(plan, setting.device, sliding_window=20)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[(20, 1), (1, 1), (2, 2)])
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


@law("paged_attention", cases=[(2, 130, 1), (257, 1, 1)])
def more_than_255_heads_are_right(
    setting: Setting, heads: tuple[int, int, int]
) -> None:
    kv_heads, group, query_len = heads
    plan = BatchPlan((query_len,), (9,), kv_heads=kv_heads, group=group, head_size=2)
    call = paged_call(plan, setting.device)
    expect_right(setting, call, run_call(setting, call))


SLOTS = [65_899, 0, 255, 256, 257, 65_535, 65_536]
"""Slots in a cache of blocks of one slot, on both sides of 2**8 and 2**16."""


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
    pairs = [[65_899, 3], [256, 257], [0, 65_800]]
    setting.candidate.copy_blocks([cache], torch.tensor(pairs))
    after = right.clone()
    for source, destination in pairs:
        after[:, destination] = right[:, source]
    expect_same("copied", packed(cache), packed(after))


SIZES = (70_000, 300, 65_600, 280)
"""Blocks, slots, heads and elements that do not fit 8 and 16 bits."""


@law("get_kv_cache_shape", "get_packed_kv_cache_shape", cases=[SIZES])
def the_shape_of_a_cache_has_its_sizes(
    setting: Setting, sizes: tuple[int, int, int, int]
) -> None:
    blocks, slots, heads, elements = sizes
    found = tuple(setting.candidate.get_kv_cache_shape(*sizes))
    expect_same("shape", sorted(found), sorted((2, *sizes)))
    expect_same("number of elements", prod(found), 2 * prod(sizes))
    packed_shape = tuple(setting.candidate.get_packed_kv_cache_shape(*sizes))
    right = (2, blocks, slots * heads * elements)
    expect_same("packed shape", packed_shape, right)


@law("get_tp_heads", cases=[(600, 300, 300), (131_200, 65_600, 2)])
def heads_past_255_are_distributed_over_ranks(
    setting: Setting, case: tuple[int, int, int]
) -> None:
    """The last rank has the last heads."""
    heads, kv_heads, ranks = case
    found = setting.candidate.get_tp_heads(heads, kv_heads, ranks, ranks - 1)
    own, own_kv = heads // ranks, kv_heads // ranks
    numbers = (found.query_start, found.query_stop, found.kv_start, found.kv_stop)
    expect_same("heads", numbers, (heads - own, heads, kv_heads - own_kv, kv_heads))
    expect_same("copies", found.copies, 1)


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


@law("StepBuffers", cases=[((1, 2), 65_599), ((300, 2), 65_300)])
def rows_and_lengths_past_16_bits_are_built(
    setting: Setting, case: tuple[tuple[int, int], int]
) -> None:
    """Two requests in the last rows of buffers for 65,600, with long contexts."""
    query_lens, computed = case
    rows, size, width = [65_599, 65_536], 1024, 65
    blocks = [
        [70_000 + req * 100 + index for index in range(width)] for req in range(2)
    ]
    buffers = setting.candidate.StepBuffers(65_600, 400, width, size, setting.device)
    buffers.append_blocks(rows, blocks)
    found: Any = buffers.build(list(query_lens), [computed, 3], rows, 300, 350)
    slots = [
        blocks[req][position // size] * size + position % size
        for req, (new, old) in enumerate(zip(query_lens, (computed, 3), strict=True))
        for position in range(old, old + new)
    ]
    padding = [-1] * (350 - len(slots))
    expect_same("slots", packed(found.slot_mapping), torch.tensor([*slots, *padding]))
    lens = [computed + query_lens[0], 3 + query_lens[1], *(0,) * 298]
    expect_same("lengths", packed(found.seq_lens), counts(lens))
    expect_same("longest", found.max_seq_len, lens[0])
    total = sum(query_lens)
    starts = counts([0, query_lens[0], *(total,) * 299])
    expect_same("starts", packed(found.query_start_loc), starts)
    for req in range(2):
        expect_same("row", found.block_table_tensor[req, :width].tolist(), blocks[req])
    buffers.clear_rows([65_599])
    buffers.append_blocks([65_599], [[70_001]])
    found = buffers.build([2], [0], [65_599])
    expect_same(
        "slots", found.slot_mapping.tolist(), [70_001 * size, 70_001 * size + 1]
    )


@law("StepBuffers", cases=[300])
def a_step_of_more_than_255_requests_is_built(setting: Setting, reqs: int) -> None:
    """All rows in order, and in reverse."""
    buffers = setting.candidate.StepBuffers(reqs, 2 * reqs, 2, 4, setting.device)
    rows = list(range(reqs))
    buffers.append_blocks(rows, [[70_000 + row] for row in rows])
    for order in (None, rows[::-1]):
        found: Any = buffers.build([1] * reqs, [2] * reqs, order)
        slots = torch.tensor([(70_000 + row) * 4 + 2 for row in order or rows])
        expect_same("slots", packed(found.slot_mapping), slots)
        expect_same("starts", packed(found.query_start_loc), counts(range(reqs + 1)))
        numbers = (found.num_reqs, found.num_actual_tokens, found.max_seq_len)
        expect_same("numbers", numbers, (reqs, reqs, 3))
        table = found.block_table_tensor[:, 0].tolist()
        expect_same("table", table, [70_000 + row for row in order or rows])


@law("StepBuffers", cases=[(257, 1), (1, 256), (300, 2)])
def rows_and_tokens_past_255_are_built(
    setting: Setting, query_lens: tuple[int, int]
) -> None:
    """Two requests in the last rows of buffers for 300."""
    rows, size = [299, 256], 16
    blocks = [[req * 40 + token for token in range(20)] for req in range(2)]
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
