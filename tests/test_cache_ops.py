"""Does every byte arrive where it should, and nowhere else?"""

from dataclasses import dataclass

import pytest
import torch
from batches import DTYPES, GARBAGE, LAYOUTS, NAN, Plan, build, empty_cache, plans
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from oracles import same_bits
from torch import Tensor


@dataclass(frozen=True)
class Write:
    """What to write where: a slot or -1 for each token; further tokens are padding."""

    slots: tuple[int, ...]
    padding: int
    num_blocks: int
    block_size: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    layout: str
    value_layout: str
    fused: bool
    seed: int

    def caches(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a key cache and a value cache of NaN, with different strides."""
        sizes = (self.num_blocks, self.block_size, self.kv_heads, self.head_size)
        return (
            empty_cache(self.layout, *sizes, self.dtype, device)[0],
            empty_cache(self.value_layout, *sizes, self.dtype, device)[1],
        )

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return key and value, as slices of a fused projection or by themselves."""
        generator = torch.Generator().manual_seed(self.seed)
        count, width = len(self.slots) + self.padding, self.kv_heads * self.head_size
        fused = torch.randn(count, 4 * width, generator=generator).to(
            device, self.dtype
        )
        parts = fused[:, 2 * width :].unflatten(1, (2, self.kv_heads, self.head_size))
        key, value = parts[:, 0], parts[:, 1]
        # padding decides whether both have the same strides
        if not self.fused:
            key = key.contiguous()
        if self.fused == bool(self.padding):
            value = value.contiguous()
        return key, value


@st.composite
def writes(draw: st.DrawFn) -> Write:
    """Return a write whose slots are scattered, some of them none."""
    block_size = draw(st.sampled_from([1, 3, 16, 16, 24, 544]))
    num_blocks = draw(st.integers(1, 4))
    slots = draw(
        st.lists(st.integers(0, num_blocks * block_size - 1), max_size=9, unique=True)
    )
    holes = draw(st.sets(st.integers(0, 8)))
    return Write(
        slots=tuple(
            -1 - 6 * (place % 2) if place in holes else slot
            for place, slot in enumerate(slots)
        ),
        padding=draw(st.sampled_from([0, 0, 1, 4])),
        num_blocks=num_blocks,
        block_size=block_size,
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        head_size=draw(st.sampled_from([1, 8, 24, 80])),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        value_layout=draw(st.sampled_from(LAYOUTS)),
        fused=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


@given(write=writes())
def test_each_token_lands_in_its_slot_and_all_else_stays(
    write: Write, twin: Twin, device: torch.device
) -> None:
    """The whole cache is compared, bit for bit: NaN stays where nothing was written."""
    caches = write.caches(device)
    key, value = write.tokens(device)
    inputs = key.clone(), value.clone()
    expected = [cache.cpu().contiguous() for cache in caches]
    for token, slot in enumerate(write.slots):
        if slot >= 0:
            block_id, offset = slot // write.block_size, slot % write.block_size
            expected[0][block_id, offset] = key[token].cpu()
            expected[1][block_id, offset] = value[token].cpu()
    slot_mapping = torch.tensor(write.slots, dtype=torch.int64, device=device)
    assert twin.reshape_and_cache(key, value, *caches, slot_mapping) is None
    assert all(map(same_bits, caches, expected))
    assert same_bits(key, inputs[0]) and same_bits(value, inputs[1])
    assert slot_mapping.tolist() == list(write.slots)


@given(write=writes())
def test_a_padded_layout_keeps_what_lies_between_its_rows(
    write: Write, twin: Twin, device: torch.device
) -> None:
    """A view of a wider allocation: the bytes beside it belong to somebody else."""
    sizes = (2, write.num_blocks, write.block_size, write.kv_heads)
    whole = torch.full((*sizes, write.head_size + 5), 7.0, dtype=write.dtype)
    whole = whole.to(device)
    cache = whole[..., : write.head_size]
    key, value = write.tokens(device)
    slot_mapping = torch.tensor(write.slots, dtype=torch.int64, device=device)
    twin.reshape_and_cache(key, value, cache[0], cache[1], slot_mapping)
    assert bool((whole[..., write.head_size :] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_bit_pattern_survives(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """NaN payloads, subnormals and minus zero: what is moved is bytes, not numbers."""
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**15), 2**15, (64, 1, 8), generator=generator)
    if dtype.itemsize == 4:
        patterns = patterns * 65537
    key = patterns.to(integer).view(dtype).to(device)
    cache = torch.zeros(2, 4, 16, 1, 8, dtype=dtype, device=device)
    slots = torch.randperm(64, generator=generator).to(device)
    twin.reshape_and_cache(key, key, cache[0], cache[1], slots)
    assert same_bits(cache[0].view(64, 1, 8)[slots], key)
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    starts = torch.tensor([0, 64], dtype=torch.int32, device=device)
    for gathered in twin.gather_cache(cache[0], cache[1], table, starts, 64):
        assert same_bits(gathered[slots], key)


@given(plan=plans(), padding=st.integers(0, 3))
def test_a_gathered_sequence_is_its_slots_in_order(
    plan: Plan, padding: int, twin: Twin, device: torch.device
) -> None:
    """What lies past the last sequence is zero, whatever NaN the cache holds."""
    batch = build(plan, device)
    starts = [sum(plan.kv_lens[:req]) for req in range(len(plan.kv_lens) + 1)]
    total = starts[-1] + padding
    gathered = twin.gather_cache(
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        torch.tensor(starts, dtype=torch.int32, device=device),
        total,
    )
    shape = (total, plan.kv_heads, plan.head_size)
    for result, cache in zip(
        gathered, (batch.key_cache.cpu(), batch.value_cache.cpu()), strict=True
    ):
        expected = torch.zeros(shape, dtype=plan.dtype)
        for start, kv_len, row in zip(starts, plan.kv_lens, batch.rows, strict=False):
            for position in range(kv_len):
                block_id = row[position // plan.block_size]
                expected[start + position] = cache[block_id, position % plan.block_size]
        assert same_bits(result, expected)


def test_what_was_written_is_read_back(twin: Twin, device: torch.device) -> None:
    """Slots, write and gather agree about where a position lies."""
    query_lens, computed, block_size = [5, 1, 20], [0, 33, 3], 16
    rows = [[9], [4, 0, 7], [2, 11]]
    generator = torch.Generator().manual_seed(1)
    seq_lens = [new + old for new, old in zip(query_lens, computed, strict=True)]
    sequences = [torch.randn(n, 2, 8, generator=generator) for n in seq_lens]
    cache = torch.full((2, 12, block_size, 2, 8), NAN, device=device)
    history = twin.compute_slot_mapping_batch(computed, [0] * 3, rows, block_size)
    slots = twin.compute_slot_mapping_batch(query_lens, computed, rows, block_size)
    for mapping, parts in (
        (history, [seq[:old] for seq, old in zip(sequences, computed, strict=True)]),
        (slots, [seq[old:] for seq, old in zip(sequences, computed, strict=True)]),
    ):
        key = torch.cat(parts).to(device)
        twin.reshape_and_cache(key, -key, cache[0], cache[1], mapping.to(device))
    starts = torch.tensor([0, 5, 39, 62], dtype=torch.int32, device=device)
    table = twin.make_block_table(rows, device=device)
    key, value = twin.gather_cache(cache[0], cache[1], table, starts, 62)
    assert torch.equal(key.cpu(), torch.cat(sequences))
    assert torch.equal(value, -key)


def test_slots_past_two_billion_elements_are_written_and_read(
    twin: Twin, device: torch.device
) -> None:
    """slot * stride passes 2**31 here; in 32 bits it wraps to memory before the cache."""
    num_blocks = 2**31 // 1024 + 5
    # nothing is touched but the blocks that are used, so this costs addresses and no memory
    caches = [
        torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16, device=device)
        for _ in range(2)
    ]
    key = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(2))
    key = key.to(device, torch.float16)
    high = num_blocks - 1
    slots = [16 * high + 15, 0, 16 * high]
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    for cache in caches:
        cache[high], cache[0] = NAN, NAN
    twin.reshape_and_cache(key, -key, caches[0], caches[1], mapping)
    for cache, written in zip(caches, (key, -key), strict=True):
        assert same_bits(cache[high, 15], written[0])
        assert same_bits(cache[0, 0], written[1])
        assert same_bits(cache[high, 0], written[2])
        assert int(cache[high].isnan().any(-1).sum()) == 14
        assert int(cache[0].isnan().any(-1).sum()) == 15
    table = torch.tensor([[high]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 16], dtype=torch.int32, device=device)
    gathered, _ = twin.gather_cache(caches[0], caches[1], table, starts, 16)
    assert same_bits(gathered, caches[0][high])


def test_tokens_that_lie_far_apart_are_found(twin: Twin, device: torch.device) -> None:
    """A slice of a long tensor: token * stride passes 2**31 at the third token."""
    stride = 2**30 + 64
    long = torch.empty(2 * stride + 64, dtype=torch.float16, device=device)
    key = long.as_strided((3, 1, 64), (stride, 64, 1))
    key.copy_(torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(5)))
    cache = torch.zeros(2, 1, 16, 1, 64, dtype=torch.float16, device=device)
    slots = torch.tensor([4, 9, 2], device=device)
    twin.reshape_and_cache(key, key, cache[0], cache[1], slots)
    assert same_bits(cache[0, 0, slots], key) and same_bits(cache[0], cache[1])


def test_slots_may_be_a_view_with_any_strides(twin: Twin, device: torch.device) -> None:
    cache = torch.full((2, 3, 4, 1, 8), NAN, device=device)
    key = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(6)).to(device)
    slots = torch.tensor([7, 0, 2, 0, 11, 0], device=device)[::2]
    twin.reshape_and_cache(key, -key, cache[0], cache[1], slots)
    flat = cache.flatten(1, 2)
    assert same_bits(flat[0, slots], key) and same_bits(flat[1, slots], -key)
    assert int(flat[0].isnan().all(-1).sum()) == 9


def test_blocks_past_two_billion_elements_are_copied(
    twin: Twin, device: torch.device
) -> None:
    """The value half alone begins past 2**31 elements here."""
    num_blocks = 2**31 // 1024 + 5
    shape = (2, num_blocks, 16, 1, 64)
    cache = torch.empty(shape, dtype=torch.float16, device=device)
    high = num_blocks - 1
    block = torch.randn(2, 16, 1, 64, generator=torch.Generator().manual_seed(4))
    block = block.to(device, torch.float16)
    cache[:, high], cache[:, high - 2], cache[:, 1] = block, NAN, NAN
    pairs = torch.tensor([[high, 1], [high, high - 2]])
    twin.copy_blocks([cache], pairs)
    for copied in (high, high - 2, 1):
        assert same_bits(cache[:, copied], block)


@st.composite
def mappings(
    draw: st.DrawFn, num_source: int, num_destination: int, same: bool
) -> list[list[int]]:
    """Return pairs in which no destination comes twice, nor is a source of the same cache."""
    destinations = draw(
        st.lists(st.integers(0, num_destination - 1), unique=True, max_size=4)
    )
    sources = [
        block for block in range(num_source) if not same or block not in destinations
    ]
    if not sources:
        return []
    return [[draw(st.sampled_from(sources)), block] for block in destinations]


@given(data=st.data(), write=writes(), layers=st.integers(0, 3))
def test_a_copied_block_is_its_source_in_every_layer(
    data: st.DataObject, write: Write, layers: int, twin: Twin, device: torch.device
) -> None:
    num_blocks = 5
    pairs = data.draw(mappings(num_blocks, num_blocks, same=True))
    sizes = (num_blocks, min(write.block_size, 24), write.kv_heads, write.head_size)
    caches = []
    for layer in range(layers):
        cache = empty_cache(write.layout, *sizes, write.dtype)
        generator = torch.Generator().manual_seed(layer)
        cache[:, :3] = torch.randn(cache[:, :3].shape, generator=generator).to(
            write.dtype
        )
        caches.append(cache.to(device))
    expected = [cache.cpu().clone() for cache in caches]
    for cache in expected:
        before = cache.clone()
        for source, destination in pairs:
            cache[:, destination] = before[:, source]
    mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    assert twin.copy_blocks(caches, mapping) is None
    for cache, wanted in zip(caches, expected, strict=True):
        assert same_bits(cache, wanted)


@given(data=st.data(), write=writes(), there=st.sampled_from(["host", "device"]))
def test_a_swapped_block_is_its_source_and_the_rest_stays(
    data: st.DataObject, write: Write, there: str, twin: Twin, device: torch.device
) -> None:
    """In both directions, and between caches of different sizes."""
    pairs = data.draw(mappings(3, 5, same=False))
    sizes = (min(write.block_size, 24), write.kv_heads, write.head_size)
    generator = torch.Generator().manual_seed(write.seed)
    source = torch.randn(2, 3, *sizes, generator=generator).to(write.dtype)
    destination = empty_cache(write.layout, 5, *sizes, write.dtype)
    expected = destination.clone()
    for taken, given_block in pairs:
        expected[:, given_block] = source[:, taken]
    places = (device, "cpu") if there == "host" else ("cpu", device)
    source, destination = source.to(places[0]), destination.to(places[1])
    before = source.clone()
    mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    assert twin.swap_blocks(source, destination, mapping) is None
    assert same_bits(destination, expected)
    assert same_bits(source, before)


def test_every_argument_of_a_gather_changes_something(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((1, 1), (20, 20)), device)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    arguments = {
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "block_table": batch.block_table,
        "seq_start_loc": starts,
        "num_tokens": 40,
    }
    before = twin.gather_cache(**arguments)
    changes = {
        "key_cache": batch.key_cache * 2,
        "value_cache": batch.value_cache * 2,
        "block_table": batch.block_table.flip(0),
        "seq_start_loc": starts - (starts == 20).int(),
        "num_tokens": 41,
    }
    for name, change in changes.items():
        after = twin.gather_cache(**(arguments | {name: change}))
        assert not all(map(same_bits, before, after)), name


def test_the_starts_of_a_gather_may_be_a_view_with_any_strides(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((1, 1), (20, 9)), device)
    starts = torch.tensor([0, 20, 29], dtype=torch.int32, device=device)
    wide = starts.repeat_interleave(2).clone()
    wide[1::2] = 1000
    caches = (batch.key_cache, batch.value_cache, batch.block_table)
    one = twin.gather_cache(*caches, starts, 29)
    other = twin.gather_cache(*caches, wide[::2], 29)
    assert all(map(same_bits, one, other))


@pytest.mark.parametrize("fault", ["shifted", "swapped", "also elsewhere"])
def test_a_wrong_write_is_seen(fault: str, reference: Twin) -> None:
    cache = torch.full((2, 3, 4, 1, 8), NAN)
    key = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(3))
    expected = cache.clone()
    expected[0, 2, 1], expected[0, 0, 3] = key[0], key[1]
    expected[1] = expected[0]
    slots = torch.tensor([9, 3])
    reference.reshape_and_cache(key, key, cache[0], cache[1], slots)
    assert same_bits(cache, expected)
    broken = torch.full_like(cache, NAN)
    wrong = {"shifted": slots + 1, "swapped": slots.flip(0), "also elsewhere": slots}
    reference.reshape_and_cache(key, key, broken[0], broken[1], wrong[fault])
    if fault == "also elsewhere":
        broken[1, 1, 0] = 0
    assert not same_bits(broken, expected)


def test_garbage_behind_a_row_is_garbage() -> None:
    """The poison of these tests would crash or show if it were read."""
    assert all(not 0 <= block_id < 10**6 for block_id in GARBAGE)
